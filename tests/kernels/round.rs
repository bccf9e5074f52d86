//! Kernels `draft_begin`, `draft_pick` and `verify` against their CPU twins: a round of drafting but for the model and its draft, whose
//! numbers are random.

use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use cedra::gpu::{Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::draft_begin::{round_size, round_words, DraftBegin};
use cedra::kernels::draft_pick::{self, DraftPick};
use cedra::kernels::verify::{self, record_words, Verify};
use cedra::kernels::Step;
use cedra::reference::math::sigmoid;
use cedra::reference::verify::{verify as judge, Drafted};
use cedra::sampling::Sampling;
use cedra::spec::Plan;
use proptest::prelude::*;

/// A round: what the model and the draft say, and how it is judged.
#[derive(Debug, Clone)]
struct Case {
    vocabulary: usize,
    block: usize,
    hidden: usize,
    rank: usize,
    sampling: Sampling,
    plan: Plan,
    /// Tokens that may still be made.
    left: u32,
    sampled: u32,
    position: u32,
    round: u32,
    /// Logits of the model, by row; of the block, and of the Markov head, by place.
    logits: Vec<Vec<f32>>,
    base: Vec<Vec<f32>>,
    markov: Vec<Vec<f32>>,
    raw: Vec<Vec<f32>>,
    embeddings: Vec<Vec<f32>>,
    confidence: Vec<f32>,
    waiting: u32,
    history: Vec<u32>,
    stop_ids: Vec<u32>,
}

const RING: u32 = 3;
const NOISE: u32 = 77;

impl Case {
    /// What the draft says is near to what the model says, nearer at some places.
    fn random(random: &mut Random, vocabulary: usize, block: usize, sampling: Sampling) -> Self {
        let (hidden, rank) = (1 + random.below(300) as usize, 1 + random.below(40) as usize);
        let logits: Vec<Vec<f32>> = (0..=block).map(|_| random.normals(vocabulary, 2.5)).collect();
        let noise = random.uniform(0.0, 1.5);
        let markov: Vec<Vec<f32>> = (0..block).map(|_| random.normals(vocabulary, 1.0)).collect();
        let mut base = vec![];
        for place in 0..block {
            let off = random.normals(vocabulary, noise);
            base.push((0..vocabulary).map(|id| logits[place][id] + off[id] - markov[place][id]).collect());
        }
        let rows = |random: &mut Random, n: usize| (0..block).map(|_| random.normals(n, 1.0)).collect::<Vec<_>>();
        let verify = (random.below(2) == 0).then(|| random.below(block as u32 + 1) as usize);
        let mut cost = 1.0;
        let mut costs = vec![];
        for _ in 0..=block {
            costs.push(cost);
            cost *= random.uniform(1.0, 1.5);
        }
        let accepted = (0..block).map(|_| random.uniform(0.3, 1.0)).collect();
        Self {
            raw: rows(random, hidden),
            embeddings: rows(random, rank),
            confidence: random.normals(hidden + rank, (2.0 / (hidden + rank) as f32).sqrt()),
            plan: Plan { verify, costs, accepted },
            left: 1 + random.below(3 * block as u32),
            sampled: random.below(1000),
            position: random.below(1000),
            round: random.below(9),
            waiting: random.below(vocabulary as u32),
            history: (0..random.below(4)).map(|_| random.below(500)).collect(),
            stop_ids: (0..random.below(3)).map(|_| random.below(vocabulary as u32)).collect(),
            vocabulary,
            block,
            hidden,
            rank,
            sampling,
            logits,
            base,
            markov,
        }
    }

    /// What the twins make of it: drafted tokens; tokens made, status, accepted; rows that stand.
    fn expected(&self) -> (Vec<u32>, Vec<u32>, u32, usize, usize) {
        let (mut drafted, mut outlook) = (vec![], self.plan.outlook());
        let most = self.block.min(self.left as usize - 1);
        while drafted.len() < most {
            let place = drafted.len();
            let (residual, markov) = self.confidence.split_at(self.hidden);
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let logit = dot(residual, &self.raw[place]) + dot(markov, &self.embeddings[place]);
            if !outlook.more(sigmoid(logit)) {
                break;
            }
            let said: Vec<f32> = self.base[place].iter().zip(&self.markov[place]).map(|(a, b)| a + b).collect();
            let Some(next) = Drafted::draw(&said, &self.sampling, self.sampled + place as u32) else { break };
            drafted.push(next);
        }
        let verdict = judge(&self.logits[..=drafted.len()], &drafted, &self.sampling, self.sampled);
        let all = drafted[..verdict.accepted].iter().map(|drafted| Some(drafted.token)).chain([verdict.next]);
        let (mut made, mut status) = (vec![], 0);
        for token in all {
            let Some(token) = token else {
                status = 2;
                break;
            };
            made.push(token);
            if self.stop_ids.contains(&token) {
                status = 1;
                break;
            }
        }
        let rows = made.len() + usize::from(status == 2);
        if status == 0 && made.len() == self.left as usize {
            status = 3;
        }
        (drafted.iter().map(|drafted| drafted.token).collect(), made, status, verdict.accepted, rows)
    }

    fn rows(&self, gpu: &Gpu, label: &str, rows: &[Vec<f32>], stride: usize) -> Buffer {
        let mut words = vec![POISON; rows.len() * stride];
        for (to, row) in words.chunks_mut(stride).zip(rows) {
            to.iter_mut().zip(row).for_each(|(to, value)| *to = value.to_bits());
        }
        upload(gpu, MemoryKind::Scratch, label, &words)
    }

    #[track_caller]
    fn check(&self, gpu: &Gpu) -> (usize, usize) {
        let Self { vocabulary, block, hidden, rank, sampling, history, .. } = self;
        let stride = vocabulary.next_multiple_of(4);
        let step = Step {
            position: self.position,
            rows: 1,
            sampled: self.sampled,
            seed_lo: sampling.seed as u32,
            seed_hi: (sampling.seed >> 32) as u32,
            top_k: sampling.top_k,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            stop_count: self.stop_ids.len() as u32,
            kept: 5,
            limit: self.sampled + self.left,
            round: self.round,
            ..Step::default()
        };
        let step = gpu.uniform("step", &step).unwrap();
        let tokens = upload(gpu, MemoryKind::Cache, "tokens", &[vec![self.waiting], vec![POISON; *block]].concat());
        let block_step = gpu.uniform("block step", &Step { decoder_floor: 9, ..Step::default() }).unwrap();
        let block_tokens = upload(gpu, MemoryKind::Cache, "block", &vec![NOISE; *block]);
        let mut words = round_words(self.plan.verify.map(|n| n as u32), &self.plan.costs, &self.plan.accepted);
        words.resize(round_size(*block), POISON);
        let round = upload(gpu, MemoryKind::Cache, "round", &words);
        let history_buffer =
            upload(gpu, MemoryKind::Cache, "history", if history.is_empty() { &[POISON][..] } else { history });
        let mut stops = self.stop_ids.clone();
        stops.resize(16, POISON);
        let stops = upload(gpu, MemoryKind::Params, "stop ids", &stops);
        let out = poisoned(gpu, MemoryKind::Cache, "out", RING as usize * record_words(*block));
        let base = self.rows(gpu, "base", &self.base, stride);
        let markov = self.rows(gpu, "markov", &self.markov, stride);
        let logits = self.rows(gpu, "logits", &self.logits, stride);
        let raw = self.rows(gpu, "raw", &self.raw, hidden.next_multiple_of(4));
        let embeddings = self.rows(gpu, "embeddings", &self.embeddings, rank.next_multiple_of(4));
        let confidence = upload(gpu, MemoryKind::Weights, "confidence", &self.confidence);
        let begin = DraftBegin::new(gpu, *block, [&step, &tokens], &round, [&block_step, &block_tokens]).unwrap();
        let dims = draft_pick::Dims {
            block: *block as u32,
            vocabulary: *vocabulary as u32,
            stride: stride as u32,
            hidden: *hidden as u32,
            rank: *rank as u32,
        };
        let buffers = draft_pick::Buffers {
            base: &base,
            markov: &markov,
            raw: &raw,
            embeddings: &embeddings,
            confidence: &confidence,
            step: &step,
            tokens: &tokens,
            round: &round,
        };
        let pick = DraftPick::new(gpu, &dims, &buffers).unwrap();
        let dims = verify::Dims {
            block: *block as u32,
            vocabulary: *vocabulary as u32,
            stride: stride as u32,
            ring: RING,
            history: history.len() as u32,
        };
        let buffers = verify::Buffers {
            logits: &logits,
            base: &base,
            markov: &markov,
            step: &step,
            tokens: &tokens,
            history: &history_buffer,
            stop_ids: &stops,
            round: &round,
            out: &out,
        };
        let verify = Verify::new(gpu, &dims, &buffers).unwrap();
        let submit = |record: &dyn Fn(&mut Recording)| {
            let mut recording = Recording::new();
            record(&mut recording);
            gpu.submit(recording).unwrap();
        };
        submit(&|recording| {
            begin.record(recording);
            (0..*block).for_each(|place| pick.record(recording, place));
        });
        let (drafted, made, status, accepted, rows) = self.expected();
        let begun: Step = read(gpu, &block_step)[0];
        let expected = Step { position: self.position, rows: *block as u32, decoder_floor: 9, ..Step::default() };
        assert_eq!(begun, expected);
        let mut noise = vec![NOISE; *block];
        noise[0] = self.waiting;
        assert_eq!(read::<u32>(gpu, &block_tokens), noise);
        let taken: Step = read(gpu, &step)[0];
        let mut ids = [vec![self.waiting], drafted.clone()].concat();
        assert_eq!(taken.rows as usize, ids.len(), "{self:?}");
        ids.resize(1 + block, POISON);
        assert_eq!(read::<u32>(gpu, &tokens), ids);

        submit(&|recording| verify.record(recording, 1 + *block as u32));
        let after: Step = read(gpu, &step)[0];
        let expected = Step {
            position: self.position + rows as u32,
            rows: u32::from(status == 0),
            sampled: self.sampled + made.len() as u32,
            status,
            round: self.round + 1,
            ..taken
        };
        assert_eq!(after, expected);
        let records: Vec<u32> = read(gpu, &out);
        let mut record = [&[made.len() as u32, status, drafted.len() as u32, accepted as u32], &made[..]].concat();
        record.resize(record_words(*block), POISON);
        for (slot, found) in records.chunks(record_words(*block)).enumerate() {
            match slot as u32 == self.round % RING {
                true => assert_eq!(found, record),
                false => assert!(found.iter().all(|&word| word == POISON)),
            }
        }
        let waits = made.last().copied().unwrap_or(self.waiting);
        assert_eq!(read::<u32>(gpu, &tokens)[0], waits);
        let before = ids[..rows].iter().rev().chain(history);
        let expected: Vec<u32> = before.take(history.len()).copied().collect();
        assert_eq!(read::<u32>(gpu, &history_buffer)[..history.len()], expected);

        // A round more: nothing once the text has ended.
        if status != 0 {
            submit(&|recording| {
                begin.record(recording);
                (0..*block).for_each(|place| pick.record(recording, place));
                verify.record(recording, 1 + *block as u32);
            });
            assert_eq!(read::<Step>(gpu, &step)[0], Step { round: self.round + 2, ..after });
            assert_eq!(read::<Step>(gpu, &block_step)[0].rows, 0);
            let next = (self.round + 1) % RING;
            assert_eq!(read::<u32>(gpu, &out)[next as usize * record_words(*block)..][..2], [0, status]);
        }
        (drafted.len(), accepted)
    }
}

fn settings() -> impl Strategy<Value = Sampling> {
    let temperature = prop_oneof![Just(0.0), Just(0.4), Just(1.0), Just(2.0)];
    let top_p = prop_oneof![Just(1.0), Just(0.9), Just(0.5)];
    (temperature, top_p, prop_oneof![Just(0u32), 1u32..50], any::<u64>())
        .prop_map(|(temperature, top_p, top_k, seed)| Sampling { temperature, top_p, top_k, seed })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn rounds_equal_their_twins(
        sampling in settings(),
        vocabulary in prop_oneof![1usize..12, 12usize..3000],
        block in 1usize..9,
        seed: u64,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        for case in 0..6 {
            Case::random(&mut Random::new(seed ^ case), vocabulary, block, sampling.clone()).check(gpu);
        }
    }
}

#[test]
fn a_round_of_the_released_size() {
    let Some(gpu) = gpu() else { return };
    let mut sums = (0, 0);
    for (seed, temperature, top_p, top_k) in [(1, 0.0, 1.0, 0), (2, 1.0, 1.0, 0), (3, 1.0, 0.9, 0), (4, 0.7, 1.0, 40)] {
        let sampling = Sampling { temperature, top_p, top_k, seed };
        let mut case = Case::random(&mut Random::new(seed), 129_280, 5, sampling);
        (case.plan.verify, case.left) = (Some(5), 9);
        let (drafted, accepted) = case.check(gpu);
        sums = (sums.0 + drafted, sums.1 + accepted);
    }
    println!("{} of {} drafted tokens accepted", sums.1, sums.0);
    assert_eq!(sums.0, 20);
}

/// Every drafted token stands, none does, and logits that are not finite: in a drafted row, in rows of the model before and behind
/// the first refusal.
#[test]
fn ends_of_a_round() {
    let Some(gpu) = gpu() else { return };
    for temperature in [0.0, 1.0] {
        let sampling = Sampling { temperature, seed: 5, ..Sampling::default() };
        let mut same = Case::random(&mut Random::new(6), 301, 4, sampling);
        (same.plan.verify, same.left, same.stop_ids) = (Some(4), 20, vec![]);
        for place in 0..4 {
            same.base[place] = same.logits[place].iter().zip(&same.markov[place]).map(|(a, b)| a - b).collect();
        }
        let mut other = same.clone();
        // p and q have nothing in common.
        for place in 0..4 {
            for id in 0..301 {
                other.base[place][id] += if id % 2 == 0 { 300.0 } else { 0.0 };
                other.logits[place][id] += if id % 2 == 1 { 300.0 } else { 0.0 };
            }
        }
        assert_eq!(other.check(gpu), (4, 0));
        let (drafted, accepted) = same.check(gpu);
        // Equal but for the last bit of sums.
        assert!(drafted == 4 && accepted >= 3, "{accepted}");
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for row in 0..5 {
                let mut broken = same.clone();
                broken.logits[row][300] = bad;
                broken.check(gpu);
                let mut broken = same.clone();
                broken.base[row.min(3)][0] = bad;
                broken.check(gpu);
            }
        }
        for left in 1..6 {
            Case { left, ..same.clone() }.check(gpu);
        }
        let (_, made, ..) = same.expected();
        for &stop in &made {
            Case { stop_ids: vec![9999, stop], ..same.clone() }.check(gpu);
        }
    }
}
