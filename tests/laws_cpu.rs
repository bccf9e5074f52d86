//! The laws that hold for the CPU model whatever its sizes: chunks, steps, causality, poison, ties. All of them to the bit.

mod common;

use cedra::formats::CacheFormat;
use cedra::reference::model::{LogitRows, Model, Options, State};
use cedra::reference::{group_rows, index_score, route, sample, select};
use cedra::sampling::Sampling;
use cedra::Error;
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use proptest::prelude::*;

/// Cases of each property; CEDRA_CASES asks for more.
fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn model(seed: u64, shape: &Shape, cache_quant: bool) -> Model {
    let random = random_checkpoint(seed, shape);
    Model::load(&random.checkpoint(), &random.tables, Options { cache_quant, mutation: None }).unwrap()
}

fn text(model: &Model, seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(model.config.vocab_size) as u32).collect()
}

/// Logits of every row, the text cut into chunks of `chunk`.
fn run(model: &Model, state: &mut State, tokens: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let chunks = tokens.chunks(chunk);
    chunks.flat_map(|chunk| model.forward(state, chunk, LogitRows::All, None).unwrap()).collect()
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|x| x.to_bits()).collect()
}

/// The whole state, to the bit.
fn state_bits(state: &State) -> Vec<u32> {
    let matrices =
        state.rings.iter().chain(state.globals.iter().flatten().flat_map(|g| [&g.entries, &g.keys, &g.remainder]));
    let floats = matrices.flat_map(|m| m.data.iter().map(|x| x.to_bits()));
    floats.chain(state.history.iter().copied()).chain([state.position as u32]).collect()
}

proptest! {
    #![proptest_config(cases(12))]

    /// Law 3 and law 4: however a text is cut, down to single tokens, it leaves the same state and logits.
    #[test]
    fn chunks_make_no_difference(seed in any::<u64>(), quant in any::<bool>()) {
        let model = model(seed, &Shape::random(seed), quant);
        let tokens = text(&model, seed, 150);
        let mut whole = model.state();
        let expected = bits(&run(&model, &mut whole, &tokens, tokens.len()));
        for chunk in [1, 2, 3, 7, 64, 129] {
            let mut state = model.state();
            prop_assert_eq!(&bits(&run(&model, &mut state, &tokens, chunk)), &expected, "chunks of {}", chunk);
            prop_assert_eq!(state_bits(&state), state_bits(&whole), "chunks of {}", chunk);
        }
    }

    /// Law 4 at every phase of a group: prefill, then token by token.
    #[test]
    fn a_step_is_a_prefill(seed in any::<u64>(), prompt in 1usize..9) {
        let model = model(seed, &Shape::random(seed), true);
        let tokens = text(&model, seed, 24);
        let expected = run(&model, &mut model.state(), &tokens, tokens.len());
        let mut state = model.state();
        let mut last = model.forward(&mut state, &tokens[..prompt], LogitRows::Last, None).unwrap();
        for (t, &token) in tokens.iter().enumerate().skip(prompt) {
            prop_assert_eq!(bits(&last), bits(&expected[t - 1..t]), "row {}", t - 1);
            last = model.forward(&mut state, &[token], LogitRows::Last, None).unwrap();
        }
    }

    /// Law 5: a later token changes nothing before it, neither logits nor entries of groups that end before it.
    #[test]
    fn a_later_token_changes_nothing_before(seed in any::<u64>(), at in 1usize..60) {
        let model = model(seed, &Shape::random(seed), true);
        let tokens = text(&model, seed, 60);
        let mut other = tokens.clone();
        other[at] = (other[at] + 1) % model.config.vocab_size as u32;
        let (mut state, mut changed) = (model.state(), model.state());
        let (a, b) = (run(&model, &mut state, &tokens, 60), run(&model, &mut changed, &other, 60));
        prop_assert_eq!(bits(&a[..at]), bits(&b[..at]));
        prop_assert_ne!(bits(&a[at..]), bits(&b[at..]));
        for (plan, (a, b)) in model.config.layers.iter().zip(state.globals.iter().zip(&changed.globals)) {
            if let (Some(a), Some(b)) = (a, b) {
                for entry in 0..at / plan.ratio {
                    prop_assert_eq!(a.entries.row(entry), b.entries.row(entry));
                    prop_assert_eq!(a.keys.row(entry), b.keys.row(entry));
                }
            }
        }
    }

    /// Law 8: memory that holds nothing visible may hold anything.
    #[test]
    fn nothing_unwritten_is_read(seed in any::<u64>(), len in 1usize..40) {
        let model = model(seed, &Shape::random(seed), true);
        let tokens = text(&model, seed, len + 3);
        let mut state = model.state();
        let first = run(&model, &mut state, &tokens[..len], 5);
        prop_assert!(first.iter().flatten().all(|l| l.is_finite()), "a fresh state is NaN all over");
        let mut poisoned = state.clone();
        for ring in &mut poisoned.rings {
            // The next token sees the window minus one rows before it; what it will overwrite is out of sight.
            ring.row_mut(len % model.config.sliding_window).fill(f32::NAN);
        }
        for (plan, global) in model.config.layers.iter().zip(&mut poisoned.globals) {
            if let Some(global) = global {
                (len % plan.ratio..plan.ratio - 1).for_each(|slot| global.remainder.row_mut(slot).fill(f32::NAN));
            }
        }
        let (a, b) = (run(&model, &mut state, &tokens[len..], 2), run(&model, &mut poisoned, &tokens[len..], 2));
        prop_assert_eq!(bits(&a), bits(&b));
    }
}

/// Scores with many ties, both zeros among them.
fn tied_scores(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.pick(&[-1.5, -0.0, 0.0, 0.25, 3.0])).collect()
}

/// The best `k` by (score, lower position), by full sort.
fn best(scores: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].partial_cmp(&scores[a as usize]).unwrap().then(a.cmp(&b)));
    order.truncate(k);
    order.sort_unstable();
    order
}

proptest! {
    #![proptest_config(cases(200))]

    /// Law 9: among equals the lower position wins, in every choice that the model makes.
    #[test]
    fn ties_go_to_the_lower_position(seed in any::<u64>(), len in 1usize..70, k in 1usize..20, block in 1usize..6) {
        let scores = tied_scores(&mut Random::new(seed), len);
        prop_assert_eq!(select::top_k(&scores, k), best(&scores, k));

        let mut blocks = select::block_scores(&scores, block);
        *blocks.last_mut().unwrap() = f32::INFINITY;
        prop_assert_eq!(select::candidate_blocks(&scores, block, k), best(&blocks, k));

        let mut ids = route::route(&scores, &vec![0.0; len], k.min(len), true, 1.5).ids;
        ids.sort_unstable();
        prop_assert_eq!(ids, best(&scores, k));

        prop_assert_eq!(sample::greedy(&scores), Some(best(&scores, 1)[0]));
    }

    /// The exact integer score is the float score of the same values, to the bit.
    #[test]
    fn packed_scores_are_exact(seed in any::<u64>(), heads in 1usize..5, d in 1usize..140) {
        let random = &mut Random::new(seed);
        let (format, size) = (CacheFormat::Mxfp4, 10f32.powi(random.below(9) as i32 - 4));
        let pack = |x: &[f32]| x.chunks(d).flat_map(|row| format.pack(row)).collect::<Vec<u32>>();
        let round = |x: &[f32]| x.chunks(d).flat_map(|row| format.round_trip(row)).collect::<Vec<f32>>();
        let (q, k, w) = (random.normals(heads * d, size), random.normals(d, 1.0 / size), random.normals(heads, 1.0));
        let exact = index_score::score_packed(&pack(&q), &w, &pack(&k), d);
        prop_assert_eq!(exact.to_bits(), index_score::score(&round(&q), &w, &round(&k)).to_bits());
    }

    /// Every pair is in one tile of its expert; tiles follow each other; a row's order of experts does not matter.
    #[test]
    fn groups_hold_every_pair_once(seed in any::<u64>(), rows in 1usize..30, slots in 1usize..5, tile in 1usize..9) {
        let random = &mut Random::new(seed);
        let experts = slots + random.below(20);
        let ids: Vec<u32> = (0..rows * slots).map(|_| random.below(experts) as u32).collect();
        let groups = group_rows::group(&ids, experts, tile);
        let mut next = 0;
        for t in groups.tiles[1..].chunks(3) {
            prop_assert!(t[1] as usize == next && t[2] >= 1 && t[2] as usize <= tile);
            let pairs = &groups.pairs[next..][..t[2] as usize];
            prop_assert!(pairs.iter().all(|&p| ids[p as usize] == t[0]) && pairs.is_sorted());
            next += t[2] as usize;
        }
        prop_assert_eq!(groups.tiles.len(), 1 + 3 * groups.tiles[0] as usize);
        let mut pairs = groups.pairs;
        pairs.sort_unstable();
        prop_assert_eq!(pairs, (0..ids.len() as u32).collect::<Vec<_>>());
    }

    /// Top-k and top-p keep what they say, and the draw takes nothing else.
    #[test]
    fn draws_stay_within_what_is_kept(seed in any::<u64>(), len in 1usize..50, k in 0u32..9, top_p in 0.01f32..1.2, r in any::<u32>()) {
        let random = &mut Random::new(seed);
        let spread = random.pick(&[0.0, 1.0, 6.0]);
        let logits: Vec<f32> = random.normals(len, spread);
        let max = logits[sample::greedy(&logits).unwrap() as usize];
        let p = sample::fixed_point(&logits, max, 0.8);
        let drawn = sample::draw(&p, k, top_p, r);
        // Rank of the drawn id, and the probability of all that is more likely.
        let ahead: Vec<u32> = (0..len as u32).filter(|&i| (p[i as usize], drawn) > (p[drawn as usize], i)).collect();
        let sum = |ids: &[u32]| ids.iter().map(|&i| p[i as usize] as u64).sum::<u64>();
        prop_assert!(p[drawn as usize] > 0 && (k == 0 || ahead.len() < k as usize));
        let mut order: Vec<u32> = (0..len as u32).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(p[i as usize]), i));
        order.truncate(if k == 0 { len } else { k as usize });
        prop_assert!((sum(&ahead) as f64) < top_p as f64 * sum(&order) as f64 + 256.0);
    }
}

/// The draw follows the probabilities, and only the seed and the counter decide it.
#[test]
fn draws_follow_the_probabilities() {
    let logits = [1.0, 3.0, 2.0, -50.0];
    let settings = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 0x1234_5678_9abc_def0 };
    let mut counts = [0u32; 4];
    for counter in 0..20_000 {
        let token = sample::sample(&logits, &settings, counter).unwrap();
        assert_eq!(sample::sample(&logits, &settings, counter), Some(token));
        counts[token as usize] += 1;
    }
    let sum: f64 = logits.iter().map(|l: &f32| (*l as f64).exp()).sum();
    for (count, logit) in counts.iter().zip(logits) {
        let expected = (logit as f64).exp() / sum;
        assert!((*count as f64 / 20_000.0 - expected).abs() < 0.015, "{counts:?}");
    }
    let other = Sampling { seed: settings.seed + (1 << 32), ..settings };
    let text = |s| (0..64).map(|c| sample::sample(&logits, s, c).unwrap()).collect::<Vec<_>>();
    assert_ne!(text(&settings), text(&other), "the upper half of the seed counts");
}

#[test]
fn a_non_finite_logit_is_no_token() {
    let settings = Sampling { temperature: 0.7, top_k: 2, top_p: 0.9, seed: 1 };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
        for at in 0..3 {
            let mut logits = [0.5, 1.0, -2.0];
            logits[at] = bad;
            assert_eq!(sample::greedy(&logits), None);
            assert_eq!(sample::sample(&logits, &settings, 0), None);
        }
    }
}

#[test]
fn every_storage_format_loads_and_runs() {
    for storage in Storage::ALL {
        let model = model(7, &Shape::odd(storage), true);
        let tokens = text(&model, 1, 40);
        let logits = run(&model, &mut model.state(), &tokens, 40);
        assert!(logits.iter().flatten().all(|l| l.is_finite()), "{storage:?}");
        let spread = logits[39].iter().fold(0f32, |m, l| m.max(l.abs()));
        assert!((0.5..50.0).contains(&spread), "{storage:?}: largest logit {spread}");
    }
}

#[test]
fn what_cannot_run_is_refused_and_changes_nothing() {
    let shape = Shape { max_positions: 12, ..Shape::odd(Storage::F32) };
    let model = model(3, &shape, true);
    let tokens = text(&model, 5, 12);
    let mut state = model.state();
    run(&model, &mut state, &tokens[..10], 10);
    let before = state_bits(&state);
    let mut refused = |tokens: &[u32]| model.forward(&mut state, tokens, LogitRows::Last, None).unwrap_err();
    assert!(matches!(refused(&[]), Error::EmptyPrompt));
    assert!(matches!(refused(&[0, 101]), Error::TokenId { id: 101, vocabulary: 101 }));
    assert!(matches!(refused(&[0; 3]), Error::Context { needed: 13, allowed: 12 }));
    assert_eq!(state_bits(&state), before);
    run(&model, &mut state, &tokens[10..], 2);
    assert!(matches!(
        model.forward(&mut state, &[0], LogitRows::Last, None),
        Err(Error::Context { needed: 13, allowed: 12 })
    ));
}
