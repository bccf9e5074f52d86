//! The tests of the tests: small slips that leave fluent text must not pass the recorded reference. Each is made alone, in
//! the CPU model, in its config or in its weights, and the fixture's end-to-end record has to notice it.

mod common;

use cedra::config::Candidates;
use cedra::reference::model::{Model, Options};
use cedra::reference::mutation::Mutation;
use common::golden::{self, Golden};
use common::support::fixture;

/// A name, and what is done to the model.
type Slip = (&'static str, fn(&mut Model));

fn slip(mutation: Mutation) -> Options {
    Options { cache_quant: false, mutation: Some(mutation) }
}

/// Slips in the order of operations.
const SLIPS: &[Slip] = &[
    ("query latent without norm", |m| m.options = slip(Mutation::NoQueryNorm)),
    ("window key without norm", |m| m.options = slip(Mutation::NoWindowKeyNorm)),
    ("index key without norm", |m| m.options = slip(Mutation::NoIndexKeyNorm)),
    ("a norm on every query head", |m| m.options = slip(Mutation::QueryNormPerHead)),
    ("pre of the sublayer itself", |m| m.options = slip(Mutation::PreWithoutLag)),
    ("streams mixed as [out, in]", |m| m.options = slip(Mutation::CombTransposed)),
    ("output not rotated back", |m| m.options = slip(Mutation::NoInverseRope)),
    ("entry at the last position of its group", |m| m.options = slip(Mutation::EntryAtGroupEnd)),
    ("newest complete group invisible", |m| m.options = slip(Mutation::VisibleOneFewer)),
    ("incomplete group visible", |m| m.options = slip(Mutation::VisibleIncomplete)),
    ("index key from the rotated latent", |m| m.options = slip(Mutation::IndexKeyFromEntry)),
    ("index score without relu", |m| m.options = slip(Mutation::ScoreWithoutRelu)),
    ("newest candidate block not forced", |m| m.options = slip(Mutation::NewestBlockNotForced)),
    ("candidates ignored", |m| m.options = slip(Mutation::CandidatesIgnored)),
    ("selection bias in the expert weight", |m| m.options = slip(Mutation::BiasInRouteWeight)),
    ("gate clamped from below", |m| m.options = slip(Mutation::GateClampedBelow)),
    ("cache quantisation on", |m| m.options.cache_quant = true),
    // Config.
    ("one theta for all layers", |m| m.config.rope_theta = m.config.compress_rope_theta),
    ("theta of the window layers for all", |m| m.config.compress_rope_theta = m.config.rope_theta),
    ("no YaRN", |m| m.config.yarn.factor = 1.0),
    ("window without the token itself counted", |m| m.config.sliding_window += 1),
    ("window one short", |m| m.config.sliding_window -= 1),
    ("one entry too many", |m| m.config.index_topk += 1),
    ("one candidate block too many", |m| m.config.candidate_topk_blocks += 1),
    ("candidate blocks of another size", |m| m.config.candidate_block_size *= 2),
    ("one Sinkhorn step", |m| m.config.hc_sinkhorn_iters = 1),
    ("expert weights not normalised", |m| m.config.norm_topk_prob = false),
    ("expert weights not scaled", |m| m.config.routed_scaling_factor = 1.0),
    ("no clamp in the experts", |m| m.config.swiglu_limit = f32::MAX),
    ("one expert fewer", |m| m.config.num_experts_per_tok -= 1),
    ("no first Engram", |m| m.config.layers[1].engram = None),
    ("no second Engram", |m| m.config.layers[4].engram = None),
    ("a Reindex layer that scores everything", |m| m.config.layers[8].candidates = Candidates::Ignored),
    // Hash constants.
    ("hash multipliers of the other Engram", |m| {
        let [a, b] = &mut m.tables.layers[..] else { unreachable!("the fixture has two Engrams") };
        std::mem::swap(&mut a.multipliers, &mut b.multipliers);
    }),
    ("hash multipliers through a JSON double", |m| {
        m.tables.layers.iter_mut().flat_map(|l| &mut l.multipliers).for_each(|x| *x = *x as f64 as u64);
    }),
    ("hash multipliers in 32 bits", |m| {
        m.tables.layers.iter_mut().flat_map(|l| &mut l.multipliers).for_each(|x| *x = *x as u32 as u64);
    }),
    ("another id before the text", |m| m.tables.pad = 0),
    ("raw ids hashed", |m| m.tables.token_map = (0..m.config.vocab_size as u32).collect()),
    // Weights.
    ("sink scaled like a key", |m| {
        let scale = (m.config.head_dim as f32).powf(-0.5);
        m.weights.layers.iter_mut().flat_map(|l| &mut l.sink).for_each(|s| *s *= scale);
    }),
    ("no sink", |m| m.weights.layers.iter_mut().for_each(|l| l.sink.fill(f32::NEG_INFINITY))),
    ("no selection bias", |m| m.weights.layers.iter_mut().for_each(|l| l.gate_bias.fill(0.0))),
    ("no shared expert", |m| m.weights.layers.iter_mut().for_each(|l| l.shared.w2.data.fill(0.0))),
    ("w1 and w3 exchanged", |m| {
        for expert in m.weights.layers.iter_mut().flat_map(|l| &mut l.experts) {
            std::mem::swap(&mut expert.w1, &mut expert.w3);
        }
    }),
    ("no gate in the pooling", |m| {
        let compressors = m.weights.layers.iter_mut().filter_map(|l| l.compressor.as_mut());
        compressors.filter_map(|c| c.wgate.as_mut()).for_each(|g| g.data.fill(0.0));
    }),
    ("norm weights of attention and experts exchanged", |m| {
        m.weights.layers.iter_mut().for_each(|l| std::mem::swap(&mut l.attn_norm, &mut l.ffn_norm));
    }),
];

#[test]
fn every_slip_is_noticed() {
    let golden = Golden::file(&fixture("golden/record_noquant.safetensors"));
    let folder = fixture("golden");
    let (right, tokens) = golden::model(&folder.join("ckpt_fp8fp4"), &folder.join("inputs.safetensors"), false);
    let faults = |model: &Model| golden::faults(&golden::end_to_end(model, &tokens[..40], &golden).0);
    assert_eq!(faults(&right), Vec::<String>::new());
    let unnoticed = SLIPS.iter().filter(|(name, make)| {
        let mut wrong = right.clone();
        make(&mut wrong);
        let found = faults(&wrong);
        println!(
            "{name}: {}",
            found.last().map_or("NOT NOTICED".into(), |fault| format!("{} faults, {fault}", found.len()))
        );
        found.is_empty()
    });
    assert_eq!(unnoticed.map(|(name, _)| *name).collect::<Vec<_>>(), Vec::<&str>::new());
}
