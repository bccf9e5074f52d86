//! What a page draws of a step, held against the CPU model: the entries and candidate blocks of the golden model's last token, and
//! the table rows of its n-grams.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::checkpoint::Checkpoint;
use cedra::config::Candidates;
use cedra::model::{Attention, Model, Sequence};
use cedra::reading::Prefill;
use cedra::reference::model::{LogitRows, Model as Twin, Options as TwinOptions, State};
use cedra::reference::trace::{Trace, Values};
use cedra::text::{NgramTables, Tokenizer};
use device_state::{gpu, greedy, made, options, text};
use std::ops::ControlFlow;
use std::sync::Arc;

/// The golden model, on the device and on the CPU.
fn golden() -> Option<(Arc<Model>, Twin)> {
    let gpu = gpu()?;
    let folder = common::support::fixture("golden/ckpt_fp8fp4");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let model = Model::load_blocking(gpu, &checkpoint, &tables, &options(512, 64), &mut |_, _| {}).unwrap();
    Some((Arc::new(model), Twin::load(&checkpoint, &tables, TwinOptions::default()).unwrap()))
}

fn read(sequence: &mut Sequence, tokens: &[u32]) {
    sequence.append_as(tokens, Prefill::Full, &mut |_| ControlFlow::Continue(())).unwrap();
}

/// The CPU model's record of the text's token at `position`, read by itself.
fn recorded(twin: &Twin, tokens: &[u32], position: usize) -> Trace {
    let mut state: State = twin.state();
    twin.forward(&mut state, &tokens[..position], LogitRows::Last, None).unwrap();
    let mut trace = Trace::new();
    twin.forward(&mut state, &tokens[position..=position], LogitRows::Last, Some(&mut trace)).unwrap();
    trace
}

fn assert_twin(attention: &Attention, twin: &Twin, tokens: &[u32]) {
    let (config, position) = (&twin.config, attention.position);
    let trace = recorded(twin, tokens, position);
    let of = |layer: usize, name: &str| trace.get(&format!("layer_{layer:02}.{name}")).map(|tensor| &tensor.values);
    for (plan, found) in config.layers.iter().zip(&attention.layers) {
        let what = format!("layer {} at {position}", plan.index);
        assert_eq!(found.window, (position + 1).saturating_sub(config.sliding_window)..position + 1, "{what}");
        assert_eq!(found.ratio, plan.ratio, "{what}");
        let expected: Vec<u32> = match of(plan.index, "topk") {
            Some(Values::I32(ids)) => ids.iter().filter(|id| **id >= 0).map(|&id| id as u32).collect(),
            _ => vec![],
        };
        assert_eq!(found.entries, expected, "{what}");
        assert_eq!(found.entries.is_empty(), plan.ratio == 0, "{what}");
        let Some(source) = plan.index_source else { continue };
        let restricted = config.layers[source].candidates == Candidates::Restricted;
        let pool = config.layers.iter().find(|layer| layer.candidates == Candidates::Source).unwrap().index;
        let Some(Values::Bool(mask)) = of(pool, "candidates") else { panic!("layer {pool} records candidates") };
        let allowed = |entry: usize| {
            let at = entry * plan.ratio;
            found.candidates.as_ref().unwrap().iter().any(|range| range.contains(&at))
        };
        assert_eq!(found.candidates.is_some(), restricted, "{what}");
        if restricted {
            assert!(mask.contains(&false), "{what}: every entry is a candidate");
            let entries: Vec<bool> = (0..mask.len()).map(allowed).collect();
            assert_eq!(&entries, mask, "{what}");
            assert!(found.entries.iter().all(|&entry| allowed(entry as usize)), "{what}");
        }
    }
}

/// Positions and candidates are those that the CPU model records, where not everything is selected: after an answer, and in the
/// middle of one.
#[test]
fn attention_is_that_of_the_reference() {
    let Some((model, twin)) = golden() else { return };
    let mut sequence = Sequence::new(model.clone()).unwrap();
    assert_eq!(sequence.attention().unwrap(), None, "nothing was made");
    read(&mut sequence, &text(model.config().vocab_size, 5, 230));
    assert_eq!(sequence.attention().unwrap(), None, "a reading chooses no token");
    made(&mut sequence, 5);
    let attention = sequence.attention().unwrap().unwrap();
    assert_eq!(attention.position, 233, "the token that was made last is not read");
    let selected = attention.layers.iter().any(|layer| layer.ratio > 0 && layer.entries.len() < 234 / layer.ratio);
    assert!(selected, "everything was selected");
    assert_twin(&attention, &twin, sequence.tokens());

    let mut generation = sequence.generate(&greedy(20)).unwrap();
    generation.next().unwrap().unwrap();
    let within = generation.sequence().attention().unwrap().unwrap();
    let rest = generation.by_ref().count();
    assert_eq!(rest, 19, "the answer goes on");
    assert_twin(&within, &twin, sequence.tokens());

    sequence.truncate(200, Default::default()).unwrap();
    assert_eq!(sequence.attention().unwrap(), None, "a replay has run");
}

/// Scratch belongs to all texts of a model: what another one has left there is not taken for one's own.
#[test]
fn another_text_takes_the_attention_away() {
    let Some((model, _)) = golden() else { return };
    let vocabulary = model.config().vocab_size;
    let [mut one, mut two] = [1, 2].map(|seed| {
        let mut sequence = Sequence::new(model.clone()).unwrap();
        read(&mut sequence, &text(vocabulary, seed, 40));
        sequence
    });
    made(&mut one, 1);
    assert!(one.attention().unwrap().is_some());
    made(&mut two, 1);
    assert_eq!(one.attention().unwrap(), None);
    assert_eq!(two.attention().unwrap().unwrap().position, 39);
    made(&mut one, 1);
    assert_eq!(one.attention().unwrap().unwrap().position, 40);
}

/// Rows of n-grams are those that the CPU model looks up, at the beginning of the text too.
#[test]
fn ngrams_are_those_of_the_reference() {
    let Some((model, twin)) = golden() else { return };
    let tokens = text(model.config().vocab_size, 9, 30);
    let mut sequence = Sequence::new(model.clone()).unwrap();
    read(&mut sequence, &tokens);
    let engram = model.config().engram.as_ref().unwrap();
    for position in [0, 1, 2, 29] {
        let found = sequence.ngrams(position).unwrap();
        assert_eq!(found.iter().map(|ngrams| ngrams.layer).collect::<Vec<_>>(), engram.layer_ids);
        let mut trace = Trace::new();
        twin.forward(&mut twin.state(), &tokens[..=position], LogitRows::Last, Some(&mut trace)).unwrap();
        let Some(Values::I64(ids)) = trace.get("top.engram_hash_ids").map(|tensor| &tensor.values) else {
            panic!("no ids")
        };
        let expected = &ids[ids.len() - found.len() * engram.rows_per_token()..];
        let rows: Vec<i64> =
            found.iter().flat_map(|ngrams| ngrams.rows.iter().flatten()).map(|&row| row.into()).collect();
        assert_eq!(rows, expected, "at {position}");
        assert!(found.iter().all(|ngrams| ngrams.rows.len() == engram.max_ngram_size - 1));
    }
    let error = sequence.ngrams(30).unwrap_err().to_string();
    assert!(error.contains("position") && error.contains("30"), "{error}");
}
