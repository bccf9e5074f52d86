//! All weights of the backbone and of the draft stages as f32 matrices.

use super::boundary::MixWeights;
use super::math::Matrix;
use crate::checkpoint::Checkpoint;
use crate::config::{DsparkConfig, LayerPlan, Role};
use crate::Result;

/// Weights of a model (`numerics.md` §14).
#[derive(Debug, Clone)]
pub struct Weights {
    /// (V, h).
    pub embed: Matrix,
    /// (h).
    pub norm: Vec<f32>,
    /// (V, h).
    pub head: Matrix,
    /// One a layer.
    pub layers: Vec<Layer>,
    /// The draft stages, where the checkpoint has them.
    pub draft: Option<Draft>,
}

/// Weights of the draft stages (`numerics.md` §13).
#[derive(Debug, Clone)]
pub struct Draft {
    /// One a stage.
    pub stages: Vec<Layer>,
    /// (h, target layers · h).
    pub main_proj: Matrix,
    /// (h).
    pub main_norm: Vec<f32>,
    /// (h).
    pub norm: Vec<f32>,
    /// (V, r).
    pub markov_embed: Matrix,
    /// (V, r).
    pub markov_head: Matrix,
    /// (h + r).
    pub confidence: Vec<f32>,
}

/// Weights of one layer, or of one draft stage.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Mix of the attention sublayer.
    pub hc_attn: MixWeights,
    /// Mix of the expert sublayer.
    pub hc_ffn: MixWeights,
    /// (h).
    pub attn_norm: Vec<f32>,
    /// (h).
    pub ffn_norm: Vec<f32>,
    /// (r_q, h).
    pub wq_a: Matrix,
    /// (r_q).
    pub q_norm: Vec<f32>,
    /// (H D, r_q).
    pub wq_b: Matrix,
    /// (D, h).
    pub wkv: Matrix,
    /// (D).
    pub kv_norm: Vec<f32>,
    /// (H).
    pub sink: Vec<f32>,
    /// (G r_o, H / G D).
    pub wo_a: Matrix,
    /// (h, G r_o).
    pub wo_b: Matrix,
    /// Full layers.
    pub compressor: Option<Compressor>,
    /// Full and Reindex layers.
    pub indexer: Option<Indexer>,
    /// (E, h).
    pub gate: Matrix,
    /// (E).
    pub gate_bias: Vec<f32>,
    /// E routed experts.
    pub experts: Vec<Expert>,
    /// The shared expert.
    pub shared: Expert,
    /// Engram layers.
    pub engram: Option<Engram>,
}

/// What makes latents and index keys.
#[derive(Debug, Clone)]
pub struct Compressor {
    /// (D, h).
    pub wkv: Matrix,
    /// (D, h), where the ratio is above 1.
    pub wgate: Option<Matrix>,
    /// (D).
    pub norm: Vec<f32>,
    /// (D_i, D).
    pub wk: Matrix,
    /// (D_i).
    pub k_norm: Vec<f32>,
}

/// What makes index queries and weighs their heads.
#[derive(Debug, Clone)]
pub struct Indexer {
    /// (H_i D_i, r_q).
    pub wq_b: Matrix,
    /// (H_i, h).
    pub weights_proj: Matrix,
}

/// One expert: `w1` (gate) and `w3` (up) are (I, h), `w2` (down) is (h, I).
#[derive(Debug, Clone)]
pub struct Expert {
    /// Gate.
    pub w1: Matrix,
    /// Down.
    pub w2: Matrix,
    /// Up.
    pub w3: Matrix,
}

/// One Engram.
#[derive(Debug, Clone)]
pub struct Engram {
    /// (rows, channels of a row).
    pub table: Matrix,
    /// ((n + 1) h, rows a token · channels of a row).
    pub wkv: Matrix,
    /// (n, h): `q_weight · k_weight`.
    pub qk: Vec<f32>,
}

impl Weights {
    /// Dequantises all tensors of a checkpoint.
    pub fn load(checkpoint: &Checkpoint) -> Result<Self> {
        let config = checkpoint.config();
        let layers = config
            .layers
            .iter()
            .map(|plan| layer(checkpoint, &format!("layers.{}", plan.index), config.n_routed_experts, Some(plan)));
        let dspark = config.dspark.as_ref().filter(|_| checkpoint.has_draft());
        Ok(Self {
            embed: matrix(checkpoint, "embed.weight")?,
            norm: vector(checkpoint, "norm.weight")?,
            head: matrix(checkpoint, "head.weight")?,
            layers: layers.collect::<Result<_>>()?,
            draft: dspark.map(|dspark| draft(checkpoint, dspark)).transpose()?,
        })
    }
}

fn draft(checkpoint: &Checkpoint, dspark: &DsparkConfig) -> Result<Draft> {
    let last = |rest: &str| format!("mtp.{}.{rest}", dspark.stages - 1);
    let stage = |i: usize| layer(checkpoint, &format!("mtp.{i}"), dspark.n_routed_experts, None);
    Ok(Draft {
        stages: (0..dspark.stages).map(stage).collect::<Result<_>>()?,
        main_proj: matrix(checkpoint, "mtp.0.main_proj.weight")?,
        main_norm: vector(checkpoint, "mtp.0.main_norm.weight")?,
        norm: vector(checkpoint, &last("norm.weight"))?,
        markov_embed: matrix(checkpoint, &last("markov_head.embed.weight"))?,
        markov_head: matrix(checkpoint, &last("markov_head.head.weight"))?,
        confidence: vector(checkpoint, &last("confidence_head.proj.weight"))?,
    })
}

fn vector(checkpoint: &Checkpoint, name: &str) -> Result<Vec<f32>> {
    Ok(checkpoint.tensor(name)?.to_f32())
}

fn matrix(checkpoint: &Checkpoint, name: &str) -> Result<Matrix> {
    let tensor = checkpoint.tensor(name)?;
    Ok(Matrix::new(tensor.rows(), tensor.channels(), tensor.to_f32()))
}

/// A backbone layer, or a draft stage (`plan` is `None`).
fn layer(checkpoint: &Checkpoint, prefix: &str, experts: usize, plan: Option<&LayerPlan>) -> Result<Layer> {
    let name = |rest: &str| format!("{prefix}.{rest}");
    let vector = |rest: &str| vector(checkpoint, &name(rest));
    let matrix = |rest: &str| matrix(checkpoint, &name(rest));
    let mix = |sublayer: &str| -> Result<MixWeights> {
        Ok(MixWeights {
            projection: matrix(&format!("hc_{sublayer}_fn"))?,
            scale: vector(&format!("hc_{sublayer}_scale"))?,
            base: vector(&format!("hc_{sublayer}_base"))?,
        })
    };
    let expert = |prefix: &str| -> Result<Expert> {
        let part = |w: &str| matrix(&format!("ffn.{prefix}.{w}.weight"));
        Ok(Expert { w1: part("w1")?, w2: part("w2")?, w3: part("w3")? })
    };
    let compressor = match plan {
        Some(plan) if plan.role == Role::Full => Some(Compressor {
            wkv: matrix("attn.compressor.wkv.weight")?,
            wgate: (plan.ratio > 1).then(|| matrix("attn.compressor.wgate.weight")).transpose()?,
            norm: vector("attn.compressor.norm.weight")?,
            wk: matrix("attn.indexer.wk.weight")?,
            k_norm: vector("attn.indexer.k_norm.weight")?,
        }),
        _ => None,
    };
    let indexer = match plan.map(|plan| plan.role) {
        Some(Role::Full | Role::Reindex) => Some(Indexer {
            wq_b: matrix("attn.indexer.wq_b.weight")?,
            weights_proj: matrix("attn.indexer.weights_proj.weight")?,
        }),
        Some(Role::Window | Role::Reuse) | None => None,
    };
    let engram = |_| -> Result<Engram> {
        let (q, k) = (vector("engram.q_weight")?, vector("engram.k_weight")?);
        Ok(Engram {
            table: matrix("engram.embed.weight")?,
            wkv: matrix("engram.wkv.weight")?,
            qk: q.iter().zip(&k).map(|(q, k)| q * k).collect(),
        })
    };
    Ok(Layer {
        hc_attn: mix("attn")?,
        hc_ffn: mix("ffn")?,
        attn_norm: vector("attn_norm.weight")?,
        ffn_norm: vector("ffn_norm.weight")?,
        wq_a: matrix("attn.wq_a.weight")?,
        q_norm: vector("attn.q_norm.weight")?,
        wq_b: matrix("attn.wq_b.weight")?,
        wkv: matrix("attn.wkv.weight")?,
        kv_norm: vector("attn.kv_norm.weight")?,
        sink: vector("attn.attn_sink")?,
        wo_a: matrix("attn.wo_a.weight")?,
        wo_b: matrix("attn.wo_b.weight")?,
        compressor,
        indexer,
        gate: matrix("ffn.gate.weight")?,
        gate_bias: vector("ffn.gate.bias")?,
        experts: (0..experts).map(|e| expert(&format!("experts.{e}"))).collect::<Result<_>>()?,
        shared: expert("shared_experts")?,
        engram: plan.and_then(|plan| plan.engram).map(engram).transpose()?,
    })
}
