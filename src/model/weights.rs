//! The weights on the device: packs of matrices that are read together, and the small vectors beside them.
//!
//! [`WeightPlan`] says where everything will lie and how many bytes it takes before a device is touched; [`Weights`] is
//! the plan carried out.

use super::pack::{ExpertPlan, LinearPlan, Loader, MatrixSpec};
use crate::checkpoint::layout::TensorSpec;
use crate::checkpoint::{Checkpoint, Format, Tensor, Weight};
use crate::config::{Candidates, Config, LayerPlan, Role};
use crate::gpu::{Buffer, Gpu, MemoryKind};
use crate::kernels::experts_up::ExpertPack;
use crate::kernels::linear::{Pack, Segment};
use crate::kernels::{boundary, cache_append, engram_gather};
use crate::layout::{selects, stride4, DownRow, Layout};
use crate::reference::rope;
use crate::text::NgramTables;
use crate::Result;
use std::ops::Range;

/// How a matrix is stored: what a plan needs to know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Number format.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// Channels of a row.
    pub channels: usize,
}

impl From<&Weight<'_>> for Stored {
    fn from(tensor: &Weight<'_>) -> Self {
        Self { format: tensor.format, rows: tensor.rows(), channels: tensor.channels() }
    }
}

impl From<&TensorSpec> for Stored {
    /// As the release stores it: the packed format where one is allowed; else BF16, the head F32.
    fn from(spec: &TensorSpec) -> Self {
        let [rows, channels] = match spec.shape[..] {
            [rows, channels] => [rows, channels],
            _ => [1, spec.shape.iter().product()],
        };
        let packed = [Format::Fp4, Format::Fp8Block, Format::Fp8Row];
        let format = packed.into_iter().find(|format| spec.formats.contains(format));
        let plain = if spec.name == "head.weight" { Format::F32 } else { Format::Bf16 };
        Self { format: format.unwrap_or(plain), rows, channels }
    }
}

/// A pack to be: names of its tensors and their places.
#[derive(Debug, Clone)]
struct Matrices {
    names: Vec<String>,
    plan: LinearPlan,
}

/// The experts of a layer to be.
#[derive(Debug, Clone)]
struct Experts {
    /// Routed experts; the shared one is one more.
    routed: usize,
    /// Matrices of an expert: `w1, w3` or `w2`.
    matrices: &'static [&'static str],
    plan: ExpertPlan,
}

/// The weights to be of a layer, or of a draft stage.
#[derive(Debug, Clone)]
struct PlannedLayer {
    /// What its tensors' names begin with.
    prefix: String,
    plan: LayerPlan,
    down: Matrices,
    /// Outputs of `down` that are also made alone.
    down_parts: Vec<Range<usize>>,
    up: Matrices,
    attention_a: Matrices,
    attention_b: Matrices,
    gate: Matrices,
    experts_up: Experts,
    experts_down: Experts,
    engram: Option<[Matrices; 2]>,
}

/// Where the weights will lie.
#[derive(Debug, Clone)]
pub struct WeightPlan {
    embed: Matrices,
    head: Matrices,
    layers: Vec<PlannedLayer>,
    /// The draft stages; none where they are not loaded.
    stages: Vec<PlannedLayer>,
    /// What they read the text through, and their Markov head.
    heads: Option<PlannedHeads>,
    /// Bytes of everything that is no pack.
    vectors: u64,
}

/// The weights to be that the draft stages have in common.
#[derive(Debug, Clone)]
struct PlannedHeads {
    main: Matrices,
    markov_embed: Matrices,
    markov: Matrices,
}

impl PlannedHeads {
    fn bytes(&self) -> u64 {
        [&self.main, &self.markov_embed, &self.markov].iter().map(|pack| pack.plan.bytes()).sum()
    }
}

/// Asks how tensors are stored and places them.
struct Planner<'a> {
    limit: u64,
    stored: &'a mut dyn FnMut(&str) -> Result<Stored>,
}

impl Planner<'_> {
    /// Matrices that read the same input: name and place in the output row.
    fn matrices(&mut self, list: Vec<(String, usize)>) -> Result<Matrices> {
        self.grouped(list, None)
    }

    fn one(&mut self, name: impl Into<String>) -> Result<Matrices> {
        self.matrices(vec![(name.into(), 0)])
    }

    /// The same, `(rows, stride)` of the groups of input channels given.
    fn grouped(&mut self, list: Vec<(String, usize)>, group: Option<(usize, usize)>) -> Result<Matrices> {
        let mut specs = Vec::with_capacity(list.len());
        for (name, out) in &list {
            let Stored { format, rows, channels: k } = (self.stored)(name)?;
            let spec = MatrixSpec { format, rows, k, out: *out, group_rows: 0, group_stride: 0 };
            specs.push(group.map_or(spec, |(rows, stride)| spec.grouped(rows, stride)));
        }
        Ok(Matrices { plan: LinearPlan::new(&specs, self.limit)?, names: list.into_iter().map(|m| m.0).collect() })
    }

    fn experts(&mut self, prefix: &str, experts: usize, matrices: &'static [&'static str]) -> Result<Experts> {
        let routed = (self.stored)(&expert_name(prefix, experts, 0, matrices[0]))?;
        let shared = (self.stored)(&expert_name(prefix, experts, experts, matrices[0]))?;
        let size = (routed.rows, routed.channels);
        let formats = [routed.format, shared.format];
        let plan = ExpertPlan::new(matrices.len(), size, experts, formats, self.limit)?;
        Ok(Experts { routed: experts, matrices, plan })
    }

    /// A layer, or a draft stage, with so many `experts`.
    fn layer(
        &mut self,
        config: &Config,
        layout: &Layout,
        prefix: String,
        layer: &LayerPlan,
        experts: usize,
    ) -> Result<(PlannedLayer, u64)> {
        let at = |name: &str| format!("{prefix}.{name}.weight");
        let row = DownRow::new(config, layer);
        let mut down = vec![(at("attn.wq_a"), 0), (at("attn.wkv"), row.window)];
        let mut up = vec![(at("attn.wq_b"), 0)];
        let mut wk = 0;
        if layer.role == Role::Full {
            down.push((at("attn.compressor.wkv"), row.latent));
            if layer.ratio > 1 {
                down.push((at("attn.compressor.wgate"), row.gate));
            }
            let Stored { format, rows, channels } = (self.stored)(&at("attn.indexer.wk"))?;
            wk = matrix_words(format, rows, channels);
        }
        if selects(layer) {
            down.push((at("attn.indexer.weights_proj"), row.index_weights));
            up.push((at("attn.indexer.wq_b"), layout.up_index));
        }
        let vectors = bytes_of(&layer_vectors(config, layout, layer, experts, wk));
        let planned = PlannedLayer {
            plan: layer.clone(),
            down_parts: vec![],
            down: self.matrices(down)?,
            up: self.matrices(up)?,
            attention_a: self.grouped(vec![(at("attn.wo_a"), 0)], Some((config.o_lora_rank, layout.group)))?,
            attention_b: self.one(at("attn.wo_b"))?,
            gate: self.one(at("ffn.gate"))?,
            experts_up: self.experts(&prefix, experts, &["w1", "w3"])?,
            experts_down: self.experts(&prefix, experts, &["w2"])?,
            engram: match layer.engram {
                Some(_) => Some([self.one(at("engram.embed"))?, self.one(at("engram.wkv"))?]),
                None => None,
            },
            prefix,
        };
        Ok((planned, vectors))
    }
}

/// What a draft stage is among layers: its attention has a window and nothing else.
pub(super) fn stage_plan(config: &Config, stage: usize) -> LayerPlan {
    LayerPlan {
        index: config.layers.len() + stage,
        role: Role::Window,
        ratio: 0,
        kv_source: None,
        index_source: None,
        candidates: Candidates::Ignored,
        engram: None,
    }
}

/// Name of a matrix of an expert; the shared expert comes after the routed ones.
fn expert_name(prefix: &str, experts: usize, expert: usize, matrix: &str) -> String {
    if expert == experts {
        format!("{prefix}.ffn.shared_experts.{matrix}.weight")
    } else {
        format!("{prefix}.ffn.experts.{expert}.{matrix}.weight")
    }
}

impl WeightPlan {
    /// Places all weights in slices of at most `limit` bytes; `stored` says how a tensor is stored.
    ///
    /// # Errors
    /// Those of `stored`; [`Error::DeviceLimit`](crate::Error::DeviceLimit) when a slice cannot hold the least that must lie together.
    pub fn new(
        config: &Config,
        layout: &Layout,
        limit: u64,
        stored: &mut dyn FnMut(&str) -> Result<Stored>,
    ) -> Result<Self> {
        let mut planner = Planner { limit, stored };
        let mut vectors = bytes_of(&[layout.hidden, if config.engram.is_some() { config.vocab_size } else { 0 }]);
        let (embed, head) = (planner.one("embed.weight")?, planner.one("head.weight")?);
        let mut layers = Vec::with_capacity(config.layers.len());
        for layer in &config.layers {
            let prefix = format!("layers.{}", layer.index);
            let (mut planned, bytes) = planner.layer(config, layout, prefix, layer, config.n_routed_experts)?;
            let row = DownRow::new(config, layer);
            let keys = row.window..row.index_weights;
            let entries = (layer.index == config.decoder()).then_some(row.latent..row.index_weights);
            planned.down_parts = std::iter::once(keys).chain(entries).collect();
            vectors += bytes;
            layers.push(planned);
        }
        let (mut stages, mut heads) = (vec![], None);
        if let Some(dspark) = config.dspark.as_ref().filter(|_| layout.draft.is_some()) {
            let last = dspark.stages - 1;
            heads = Some(PlannedHeads {
                main: planner.one("mtp.0.main_proj.weight")?,
                markov_embed: planner.one(format!("mtp.{last}.markov_head.embed.weight"))?,
                markov: planner.one(format!("mtp.{last}.markov_head.head.weight"))?,
            });
            for stage in 0..dspark.stages {
                let plan = stage_plan(config, stage);
                let (mut planned, bytes) =
                    planner.layer(config, layout, format!("mtp.{stage}"), &plan, dspark.n_routed_experts)?;
                let row = DownRow::new(config, &plan);
                planned.down_parts.push(row.window..row.width);
                vectors += bytes;
                stages.push(planned);
            }
            vectors += bytes_of(&[layout.hidden, layout.hidden, config.hidden_size + dspark.markov_rank]);
        }
        Ok(Self { embed, head, layers, stages, heads, vectors })
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let layers = self.layers.iter().chain(&self.stages).flat_map(|layer| {
            let packs = [&layer.down, &layer.up, &layer.attention_a, &layer.attention_b, &layer.gate];
            let experts = [&layer.experts_up, &layer.experts_down].map(|experts| experts.plan.bytes());
            let engram = layer.engram.iter().flatten();
            packs.into_iter().chain(engram).map(|pack| pack.plan.bytes()).chain(experts)
        });
        let heads = self.heads.as_ref().map_or(0, PlannedHeads::bytes);
        self.vectors + heads + self.embed.plan.bytes() + self.head.plan.bytes() + layers.sum::<u64>()
    }

    /// Draft stages.
    pub(super) fn stages(&self) -> usize {
        self.stages.len()
    }

    /// Slices of each kind of pack, for the count of uniforms: linear, experts, embedding, Engram tables.
    pub(super) fn slices(&self) -> Slices {
        let mut slices =
            Slices { linear: self.head.plan.slices(), embed: self.embed.plan.slices(), ..Slices::default() };
        // A drafted block has an embedding and a head of its own, its tokens another head; the Markov head has a place for each.
        if let Some(heads) = &self.heads {
            slices.linear += heads.main.plan.slices() + 2 * self.head.plan.slices();
            slices.markov = heads.markov.plan.slices();
            slices.embed += self.embed.plan.slices() + heads.markov_embed.plan.slices();
        }
        for layer in self.layers.iter().chain(&self.stages) {
            let packs = [&layer.down, &layer.up, &layer.attention_a, &layer.attention_b, &layer.gate];
            slices.linear += packs.iter().map(|pack| pack.plan.slices()).sum::<usize>();
            slices.parts += layer.down_parts.iter().map(|part| layer.down.plan.part(part)).sum::<usize>();
            slices.experts_up += layer.experts_up.plan.slices();
            slices.experts_down += layer.experts_down.plan.slices();
            if let Some([table, wkv]) = &layer.engram {
                slices.tables += table.plan.slices();
                slices.linear += wkv.plan.slices();
            }
        }
        slices
    }
}

/// Numbers of slices: each is a dispatch with a uniform of its own.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slices {
    pub linear: usize,
    /// Slices that parts of `down` read.
    pub parts: usize,
    /// Slices of the Markov head.
    pub markov: usize,
    pub experts_up: usize,
    pub experts_down: usize,
    pub embed: usize,
    pub tables: usize,
}

/// Bytes of buffers of so many words each; buffers of none are not made.
fn bytes_of(words: &[usize]) -> u64 {
    words.iter().filter(|&&words| words > 0).map(|&words| Buffer::allocated(4 * words as u64)).sum()
}

/// Words of the small buffers of a layer; `wk` are those of the index key projection.
fn layer_vectors(config: &Config, layout: &Layout, layer: &LayerPlan, experts: usize, wk: usize) -> Vec<usize> {
    let n = config.hc_mult;
    let mix = [n * (n + 2) * layout.streams, 3 + n * (n + 2)];
    let freqs = config.qk_rope_head_dim / 2;
    let constants = if layer.role == Role::Full {
        (2 * config.head_dim + freqs + config.index_head_dim).next_multiple_of(4) + wk
    } else {
        config.head_dim + freqs
    };
    let mut words = vec![layout.hidden, stride4(config.q_lora_rank), layout.hidden];
    words.extend([mix, mix].concat());
    words.extend([constants, freqs + config.num_attention_heads, experts]);
    if let (Some(_), Some(engram)) = (layer.engram, &config.engram) {
        words.extend([n * config.hidden_size, 2 * engram.max_ngram_size + 2 * engram.rows_per_token()]);
    }
    words
}

/// Words of a matrix outside a pack: rows of whole chunks of 32 channels, then rows of scales in whole words.
fn matrix_words(format: Format, rows: usize, channels: usize) -> usize {
    let chunks = channels.div_ceil(32);
    let scale_rows = match format {
        Format::F32 | Format::Bf16 | Format::F16 => 0,
        Format::Fp8Block => rows.div_ceil(32),
        Format::Fp8Row | Format::Fp4 => rows,
    };
    rows * chunks * format.row_bytes(32) / 4 + scale_rows * chunks.div_ceil(4)
}

/// Such a matrix as the only one of a pack.
fn matrix(tensor: &Tensor<'_>) -> (Vec<u32>, Segment) {
    let (rows, chunks) = (tensor.rows(), tensor.channels().div_ceil(32));
    let mut bytes = Vec::with_capacity(4 * matrix_words(tensor.format, rows, tensor.channels()));
    let mut pad = |data: &[u8], width: usize, padded: usize, padding: u8| {
        for row in data.chunks(width) {
            bytes.extend_from_slice(row);
            bytes.resize(bytes.len() - row.len() + padded, padding);
        }
        bytes.len() / 4
    };
    let codes = tensor.format.row_bytes(tensor.channels());
    let scales = pad(tensor.data, codes, chunks * tensor.format.row_bytes(32), 0);
    if let Some((data, [_, columns])) = tensor.scales {
        pad(data, columns, 4 * chunks.div_ceil(4), 127);
    }
    let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let segment = Segment {
        format: tensor.format as u32,
        data: 0,
        scales: scales as u32,
        rows: rows as u32,
        out: 0,
        first_row: 0,
        group_rows: 0,
        group_stride: 0,
    };
    (words, segment)
}

/// The mix of a sublayer.
#[derive(Debug)]
pub struct Mix {
    /// Projection, padded by [`boundary::Dims::pad_mix_fn`].
    pub projection: Buffer,
    /// [scale 3, base n (n + 2)].
    pub constants: Buffer,
}

/// An Engram's weights.
#[derive(Debug)]
pub struct Engram {
    /// Rows of n-grams.
    pub table: Pack,
    /// Keys and value from the rows.
    pub wkv: Pack,
    /// `q_weight · k_weight` (n, h).
    pub qk: Buffer,
    /// Constants of the hash.
    pub hash: Buffer,
}

/// A layer's weights.
#[derive(Debug)]
pub struct Layer {
    /// Norm of the attention input.
    pub attn_norm: Buffer,
    /// Norm of the query latent.
    pub q_norm: Buffer,
    /// Norm of the expert input.
    pub ffn_norm: Buffer,
    /// Mixes of the attention and of the expert sublayer.
    pub mixes: [Mix; 2],
    /// What reads the attention input: see [`DownRow`].
    pub down: Pack,
    /// What reads the query latent: queries and index queries.
    pub up: Pack,
    /// `wo_a`, by group.
    pub attention_a: Pack,
    /// `wo_b`.
    pub attention_b: Pack,
    /// Router.
    pub gate: Pack,
    /// Router bias.
    pub gate_bias: Buffer,
    /// `w1` and `w3`.
    pub experts_up: ExpertPack,
    /// `w2`.
    pub experts_down: ExpertPack,
    /// Constants of `cache_append`.
    pub append: Buffer,
    /// Constants of `attend`.
    pub attend: Buffer,
    /// Full layers: `indexer.wk` in the constants of `cache_append`.
    pub wk: Option<Segment>,
    /// Engram layers.
    pub engram: Option<Engram>,
}

/// All weights.
#[derive(Debug)]
pub struct Weights {
    /// Embedding.
    pub embed: Pack,
    /// Output head.
    pub head: Pack,
    /// Final norm.
    pub norm: Buffer,
    /// Compressed token ids; none without Engram.
    pub token_map: Option<Buffer>,
    /// One a layer.
    pub layers: Vec<Layer>,
    /// The draft stages, where they are loaded.
    pub draft: Option<Draft>,
}

/// Weights of the draft stages.
#[derive(Debug)]
pub struct Draft {
    /// One a stage.
    pub stages: Vec<Layer>,
    /// `main_proj`.
    pub main: Pack,
    /// Norm of what it makes.
    pub main_norm: Buffer,
    /// Norm before the head.
    pub norm: Buffer,
    /// Embeddings of the Markov head.
    pub markov_embed: Pack,
    /// Logits from them.
    pub markov: Pack,
    /// The confidence head (h + r), f32.
    pub confidence: Buffer,
}

/// Uploads the small vectors.
struct Vectors<'a> {
    gpu: &'a Gpu,
    checkpoint: &'a Checkpoint,
}

impl Vectors<'_> {
    /// The mix of a sublayer of the layer that `prefix` names.
    async fn mix(&self, prefix: &str, sublayer: &str, dims: &boundary::Dims) -> Result<Mix> {
        let at = |part: &str| format!("{prefix}.hc_{sublayer}_{part}");
        let projection = self.values(&at("fn")).await?;
        let mut constants = self.values(&at("scale")).await?;
        constants.extend(self.values(&at("base")).await?);
        Ok(Mix {
            projection: self.floats(&at("fn"), &dims.pad_mix_fn(&projection))?,
            constants: self.floats(&at("base"), &constants)?,
        })
    }
    fn words(&self, label: &str, words: &[u32]) -> Result<Buffer> {
        let buffer = self.gpu.buffer(MemoryKind::Weights, label, 4 * words.len() as u64)?;
        self.gpu.upload(&buffer, 0, bytemuck::cast_slice(words));
        Ok(buffer)
    }
    fn floats(&self, label: &str, values: &[f32]) -> Result<Buffer> {
        self.words(label, bytemuck::cast_slice(values))
    }
    async fn values(&self, name: &str) -> Result<Vec<f32>> {
        Ok(self.checkpoint.weight(name)?.fetch().await?.tensor().to_f32())
    }
    /// A norm's weight, padded by zeros to whole quads.
    async fn norm(&self, name: &str) -> Result<Buffer> {
        let mut values = self.values(name).await?;
        values.resize(stride4(values.len()), 0.0);
        self.floats(name, &values)
    }
}

impl WeightPlan {
    /// The plan of a checkpoint's weights, in slices of at most `limit` bytes.
    ///
    /// # Errors
    /// As [`WeightPlan::new`].
    pub fn of(checkpoint: &Checkpoint, layout: &Layout, limit: u64) -> Result<Self> {
        let stored = &mut |name: &str| checkpoint.weight(name).map(|weight| Stored::from(&weight));
        Self::new(checkpoint.config(), layout, limit, stored)
    }

    /// Streams the weights to the device. `progress` hears the bytes that are there, of [`WeightPlan::bytes`] in all.
    ///
    /// # Errors
    /// The checkpoint's and the device's.
    pub async fn load(
        &self,
        gpu: &Gpu,
        checkpoint: &Checkpoint,
        tables: &NgramTables,
        dims: &boundary::Dims,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Weights> {
        let config = checkpoint.config();
        let vectors = Vectors { gpu, checkpoint };
        let mut loader = Loader::new(gpu);
        let held = || gpu.counters().allocated.get(&MemoryKind::Weights).copied().unwrap_or(0);
        let before = held();
        let embed = self.embed.load(&mut loader, checkpoint).await?;
        let token_map = match config.engram {
            Some(_) => Some(vectors.words("Engram token map", &tables.token_map)?),
            None => None,
        };
        let norm = vectors.norm("norm.weight").await?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for planned in &self.layers {
            progress(held() - before);
            layers.push(planned.load(&mut loader, &vectors, config, tables, dims).await?);
        }
        let mut stages = Vec::with_capacity(self.stages.len());
        for planned in &self.stages {
            progress(held() - before);
            stages.push(planned.load(&mut loader, &vectors, config, tables, dims).await?);
        }
        let draft = match self.stages.last().zip(self.heads.as_ref()) {
            Some((last, heads)) => Some(Draft {
                stages,
                main: heads.main.load(&mut loader, checkpoint).await?,
                main_norm: vectors.norm("mtp.0.main_norm.weight").await?,
                norm: vectors.norm(&format!("{}.norm.weight", last.prefix)).await?,
                markov_embed: heads.markov_embed.load(&mut loader, checkpoint).await?,
                markov: heads.markov.load(&mut loader, checkpoint).await?,
                confidence: {
                    let name = format!("{}.confidence_head.proj.weight", last.prefix);
                    vectors.floats(&name, &vectors.values(&name).await?)?
                },
            }),
            None => None,
        };
        let head = self.head.load(&mut loader, checkpoint).await?;
        progress(held() - before);
        Ok(Weights { embed, head, norm, token_map, layers, draft })
    }
}

impl Matrices {
    async fn load(&self, loader: &mut Loader<'_>, checkpoint: &Checkpoint) -> Result<Pack> {
        self.plan.load(loader, &self.names[0], |i| checkpoint.weight(&self.names[i])).await
    }
}

impl Experts {
    async fn load(&self, loader: &mut Loader<'_>, checkpoint: &Checkpoint, prefix: &str) -> Result<ExpertPack> {
        let label = format!("{prefix}.ffn.experts.{}", self.matrices[0]);
        let tensor =
            |expert, matrix: usize| checkpoint.weight(&expert_name(prefix, self.routed, expert, self.matrices[matrix]));
        self.plan.load(loader, &label, tensor).await
    }
}

impl PlannedLayer {
    async fn load(
        &self,
        loader: &mut Loader<'_>,
        vectors: &Vectors<'_>,
        config: &Config,
        tables: &NgramTables,
        dims: &boundary::Dims,
    ) -> Result<Layer> {
        let Self { prefix, plan, .. } = self;
        let checkpoint = vectors.checkpoint;
        let at = |name: &str| format!("{prefix}.{name}");
        let freqs = rope::frequencies(config, plan.ratio > 0);
        let kv_norm = vectors.values(&at("attn.kv_norm.weight")).await?;
        let (append, wk) = if plan.role == Role::Full {
            let tensor = checkpoint.weight(&at("attn.indexer.wk.weight"))?.fetch().await?;
            let (words, wk) = matrix(&tensor.tensor());
            let comp_norm = vectors.values(&at("attn.compressor.norm.weight")).await?;
            let k_norm = vectors.values(&at("attn.indexer.k_norm.weight")).await?;
            (cache_append::full_constants(&kv_norm, &freqs, &comp_norm, &k_norm, &words), Some(wk))
        } else {
            (cache_append::constants(&kv_norm, &freqs), None)
        };
        let sink = vectors.values(&at("attn.attn_sink")).await?;
        let engram = match (&self.engram, plan.engram, &config.engram) {
            (Some([table, wkv]), Some(slot), Some(engram)) => {
                let q = vectors.values(&at("engram.q_weight")).await?;
                let k = vectors.values(&at("engram.k_weight")).await?;
                let qk: Vec<f32> = q.iter().zip(&k).map(|(q, k)| q * k).collect();
                let constants = &tables.layers[slot];
                let hash = engram_dims(engram, tables).hash(&constants.multipliers, &constants.primes);
                Some(Engram {
                    table: table.load(loader, checkpoint).await?,
                    wkv: wkv.load(loader, checkpoint).await?,
                    qk: vectors.floats(&at("engram.q_weight"), &qk)?,
                    hash: vectors.words(&at("engram hash"), &hash)?,
                })
            }
            _ => None,
        };
        Ok(Layer {
            attn_norm: vectors.norm(&at("attn_norm.weight")).await?,
            q_norm: vectors.norm(&at("attn.q_norm.weight")).await?,
            ffn_norm: vectors.norm(&at("ffn_norm.weight")).await?,
            mixes: [vectors.mix(prefix, "attn", dims).await?, vectors.mix(prefix, "ffn", dims).await?],
            down: self.down.load(loader, checkpoint).await?,
            up: self.up.load(loader, checkpoint).await?,
            attention_a: self.attention_a.load(loader, checkpoint).await?,
            attention_b: self.attention_b.load(loader, checkpoint).await?,
            gate: self.gate.load(loader, checkpoint).await?,
            gate_bias: vectors.floats(&at("ffn.gate.bias"), &vectors.values(&at("ffn.gate.bias")).await?)?,
            experts_up: self.experts_up.load(loader, checkpoint, prefix).await?,
            experts_down: self.experts_down.load(loader, checkpoint, prefix).await?,
            append: vectors.words(&at("cache_append constants"), &append)?,
            attend: vectors.floats(&at("attend constants"), &[freqs, sink].concat())?,
            wk,
            engram,
        })
    }
}

/// Sizes and special tokens of a config's Engrams.
pub(super) fn engram_dims(engram: &crate::config::EngramConfig, tables: &NgramTables) -> engram_gather::Dims {
    engram_gather::Dims {
        ngram: engram.max_ngram_size as u32,
        heads: engram.n_heads as u32,
        head_dim: engram.head_dim as u32,
        // Text only: an image token is a token like any other here, as in the CPU model.
        image_token: None,
        pad_token: None,
        pad_compressed: tables.pad,
    }
}
