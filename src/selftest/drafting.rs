//! The end of a round of drafting: what is taken of a block, and what stands of it.

use super::lab::{strided, Found, Lab};
use crate::gpu::MemoryKind;
use crate::kernels::draft_begin::{round_size, round_words, DraftBegin};
use crate::kernels::draft_pick::{self, DraftPick};
use crate::kernels::verify::{self, record_words, Verify};
use crate::kernels::Step;
use crate::reference::math::sigmoid;
use crate::reference::verify::{verify as judge, Drafted};
use crate::sampling::Sampling;
use crate::spec::Plan;
use crate::Result;

const VOCABULARY: usize = 301;
const BLOCK: usize = 4;
const HIDDEN: usize = 70;
const RANK: usize = 10;
const START: u32 = 40;
const WAITING: u32 = 7;

/// Rounds, greedy and drawn, that verify what pays: a draft that is often right.
pub async fn round(lab: &mut Lab<'_>) -> Result<Found> {
    let mut found = Found::exact();
    for (temperature, top_k) in [(0.0, 0), (0.9, 0), (1.2, 20)] {
        let sampling = Sampling { temperature, top_k, seed: 77 | 5 << 32, ..Sampling::default() };
        let logits = lab.rows(BLOCK + 1, VOCABULARY, 4.0);
        let markov = lab.rows(BLOCK, VOCABULARY, 1.0);
        let off = lab.rows(BLOCK, VOCABULARY, 0.7);
        let sum = |a: &[f32], b: &[f32], sign: f32| a.iter().zip(b).map(|(a, b)| a + sign * b).collect::<Vec<f32>>();
        let base: Vec<_> = (0..BLOCK).map(|i| sum(&sum(&logits[i], &off[i], 1.0), &markov[i], -1.0)).collect();
        let (raw, embeddings) = (lab.rows(BLOCK, HIDDEN, 1.0), lab.rows(BLOCK, RANK, 1.0));
        let confidence = lab.values(HIDDEN + RANK, 0.1);
        let plan = Plan {
            verify: None,
            costs: (0..=BLOCK).map(|k| 1.0 + 0.15 * k as f32).collect(),
            accepted: vec![0.7; BLOCK],
        };
        let (mut drafted, mut outlook) = (vec![], plan.outlook());
        while drafted.len() < BLOCK {
            let place = drafted.len();
            let seen = raw[place].iter().chain(&embeddings[place]);
            let accepts = sigmoid(seen.zip(&confidence).map(|(a, b)| a * b).sum());
            if !outlook.more(accepts) {
                break;
            }
            let said = sum(&base[place], &markov[place], 1.0);
            drafted.push(Drafted::draw(&said, &sampling, place as u32).expect("these logits are numbers"));
        }
        let verdict = judge(&logits[..=drafted.len()], &drafted, &sampling, 0);
        let drafted: Vec<u32> = drafted.iter().map(|drafted| drafted.token).collect();
        let made = [&drafted[..verdict.accepted], &[verdict.next.expect("these logits are numbers")]].concat();

        let stride = VOCABULARY.next_multiple_of(4);
        let [step, tokens, block_step, block_tokens, history, out] = lab
            .run(|recording| {
                let step = lab.step(Step {
                    position: START,
                    rows: 1,
                    seed_lo: sampling.seed as u32,
                    seed_hi: (sampling.seed >> 32) as u32,
                    top_k,
                    temperature,
                    top_p: 1.0,
                    limit: 100,
                    ..Step::default()
                })?;
                let tokens = lab.scratch(&[vec![WAITING], vec![u32::MAX; BLOCK]].concat())?;
                let (block_step, block_tokens) = (lab.step(Step::default())?, lab.scratch(&[5u32; BLOCK])?);
                let mut words = round_words(None, &plan.costs, &plan.accepted);
                words.resize(round_size(BLOCK), u32::MAX);
                let round = lab.scratch(&words)?;
                let (history, out) = (lab.scratch(&[1u32, 2, 3])?, lab.room(record_words(BLOCK))?);
                let stop_ids = lab.upload(MemoryKind::Params, &[0u32; 16])?;
                let rows = |rows: &[Vec<f32>], stride| lab.scratch(&strided(rows, stride, 0));
                let (logits, base, markov) = (rows(&logits, stride)?, rows(&base, stride)?, rows(&markov, stride)?);
                let (raw, embeddings) =
                    (rows(&raw, HIDDEN.next_multiple_of(4))?, rows(&embeddings, RANK.next_multiple_of(4))?);
                let confidence = lab.weights(&confidence)?;
                let (block, vocabulary, stride) = (BLOCK as u32, VOCABULARY as u32, stride as u32);
                DraftBegin::new(lab.gpu, BLOCK, [&step, &tokens], &round, [&block_step, &block_tokens])?
                    .record(recording);
                let pick = DraftPick::new(
                    lab.gpu,
                    &draft_pick::Dims { block, vocabulary, stride, hidden: HIDDEN as u32, rank: RANK as u32 },
                    &draft_pick::Buffers {
                        base: &base,
                        markov: &markov,
                        raw: &raw,
                        embeddings: &embeddings,
                        confidence: &confidence,
                        step: &step,
                        tokens: &tokens,
                        round: &round,
                    },
                )?;
                (0..BLOCK).for_each(|place| pick.record(recording, place));
                Verify::new(
                    lab.gpu,
                    &verify::Dims { block, vocabulary, stride, ring: 1, history: 3 },
                    &verify::Buffers {
                        logits: &logits,
                        base: &base,
                        markov: &markov,
                        step: &step,
                        tokens: &tokens,
                        history: &history,
                        stop_ids: &stop_ids,
                        round: &round,
                        out: &out,
                    },
                )?
                .record(recording, 1 + BLOCK as u32);
                Ok([step, tokens, block_step, block_tokens, history, out])
            })
            .await?;
        let what = |name: &str| format!("{name} at {sampling:?}");
        let rows = made.len() as u32;
        found.same(&what("block"), &lab.read::<u32>(&block_tokens).await?, &[WAITING, 5, 5, 5]);
        found.same(&what("block's step"), &lab.read::<u32>(&block_step).await?[..2], &[START, BLOCK as u32]);
        let record = [rows, 0, drafted.len() as u32, verdict.accepted as u32];
        let out: Vec<u32> = lab.read(&out).await?;
        found.same(&what("record"), &out[..4 + made.len()], &[&record, &made[..]].concat());
        found.untouched(&what("record"), &out[4 + made.len()..]);
        found.same(&what("drafted tokens"), &lab.read::<u32>(&tokens).await?[1..=drafted.len()], &drafted);
        found.same(&what("step"), &lab.read::<u32>(&step).await?[..4], &[START + rows, 1, rows, 0]);
        let before = made[..made.len() - 1].iter().rev().chain([&WAITING, &1, &2, &3]);
        let expected: Vec<u32> = before.take(3).copied().collect();
        found.same(&what("history"), &lab.read::<u32>(&history).await?, &expected);
    }
    Ok(found)
}
