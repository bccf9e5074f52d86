//! Activations of a step. All sequences of a model share them: the queue runs one step after the other.

use crate::config::Config;
use crate::gpu::{Buffer, Gpu, MemoryKind};
use crate::layout::{selects, DraftLayout, Layout};
use crate::Result;

macro_rules! scratch {
    ($($(#[$doc:meta])* $name:ident: $words:expr),+ $(,)?) => {
        /// Activations of a step; T is the most rows in flight.
        #[derive(Debug)]
        pub(crate) struct Scratch {
            $($(#[$doc])* pub $name: Buffer,)+
            /// By layer, of those that select: (T, 1 + topk), count, entries. Each has its own, so that all of a step can be looked at
            /// when it is over.
            pub selections: Vec<Option<Buffer>>,
        }

        /// Words of each buffer.
        pub(crate) fn words(config: &Config, layout: &Layout) -> Vec<(&'static str, usize)> {
            let size = Size { config, layout, rows: layout.rows };
            let mut all = vec![$((stringify!($name), { let words: fn(&Size<'_>) -> usize = $words; words(&size) })),+];
            let selections = config.layers.iter().filter(|layer| selects(layer));
            all.extend(selections.map(|_| ("selection", layout.rows * layout.selection)));
            all
        }

        impl Scratch {
            /// Makes the buffers.
            ///
            /// # Errors
            /// As [`Gpu::buffer`].
            pub fn new(gpu: &Gpu, config: &Config, layout: &Layout) -> Result<Self> {
                let mut sizes = words(config, layout).into_iter();
                let mut next = || {
                    let (name, words) = sizes.next().expect("a size for each buffer");
                    gpu.buffer(MemoryKind::Scratch, name, 4 * words as u64)
                };
                $(let $name = next()?;)+
                let mut selection = |layer| if selects(layer) { next().map(Some) } else { Ok(None) };
                let selections = config.layers.iter().map(&mut selection).collect::<Result<_>>()?;
                Ok(Self { $($name,)+ selections })
            }

            /// Fills everything with `word`.
            pub fn poison(&self, gpu: &Gpu, word: u32) {
                $(gpu.fill(&self.$name, word);)+
                self.selections.iter().flatten().for_each(|selection| gpu.fill(selection, word));
            }
        }
    };
}

impl Size<'_> {
    /// The larger of a size of the layers and of the draft stages.
    fn most(&self, layers: usize, stages: fn(&DraftLayout) -> usize) -> usize {
        layers.max(self.layout.draft.as_ref().map_or(0, stages))
    }
    fn parts(&self) -> usize {
        self.most(self.layout.parts, |draft| draft.parts)
    }
}

struct Size<'a> {
    config: &'a Config,
    layout: &'a Layout,
    rows: usize,
}

scratch! {
    /// (T, n, h4): residual streams.
    streams: |s| s.rows * s.layout.streams,
    /// (T, S, n (n + 2) + 1): partial sums of the mixes of attention sublayers.
    partials_attn: |s| s.rows * s.layout.partials,
    /// The same of expert sublayers.
    partials_ffn: |s| s.rows * s.layout.partials,
    /// (T, h4): collapsed streams.
    x: |s| s.rows * s.layout.hidden,
    /// (T, down): see [`DownRow`](crate::layout::DownRow).
    down: |s| s.rows * s.layout.down,
    /// (T, up): queries, index queries.
    up: |s| s.rows * s.layout.up,
    /// (T, packed window key): those of a step of several rows.
    chunk: |s| s.rows * s.layout.window_row,
    /// (T, H_i, packed index query).
    index_queries: |s| s.rows * s.config.index_n_heads * s.layout.key_row,
    /// Scores of a tile, by row.
    scores: |s| s.layout.tiling.score_words(),
    /// Lists of a tile's segments.
    lists: |s| s.layout.tiling.list_words(),
    /// Keys that are carried from tile to tile.
    carry: |s| s.layout.tiling.carry_words(),
    /// Block maxima of a tile at the candidate source.
    block_maxima: |s| s.layout.tiling.maxima_words(),
    /// (T, topk, packed latent): those of the selected entries.
    latents: |s| s.rows * s.layout.latents,
    /// (T, 1 + blocks): count, candidate blocks.
    candidates: |s| s.rows * s.layout.candidates,
    /// (T, G, H / G · D): attention before `wo_a`.
    attended: |s| s.rows * s.layout.attended,
    /// (T, G · r_o): after it.
    attention_latent: |s| s.rows * s.layout.attention_latent,
    /// (T, parts, h4): a sublayer's output.
    z: |s| s.rows * s.parts() * s.layout.hidden,
    /// (T, E): router logits.
    gate: |s| s.rows * s.most(s.layout.gate, |draft| draft.gate),
    /// (T, parts): experts.
    route_ids: |s| s.rows * s.parts(),
    /// (T, parts): their weights.
    route_gains: |s| s.rows * s.parts(),
    /// (T · parts): pairs by expert.
    pairs: |s| s.rows * s.parts(),
    /// Their tiles.
    tiles: |s| s.most(s.layout.tiles, |draft| draft.tiles),
    /// (T · parts, I): experts' hidden vectors.
    hidden: |s| s.rows * s.parts() * s.layout.expert_hidden,
    /// (Engram layers, T, rows of n-grams): a region an Engram.
    engram_rows: |s| s.config.engram.as_ref().map_or(0, |engram| engram.layer_ids.len()) * s.layout.engram_region,
    /// (T, (n + 1) h): its keys and value.
    engram_kv: |s| if s.layout.engram == 0 { 0 } else { s.rows * s.layout.engram_kv },
    /// (logit rows, V).
    logits: |s| s.layout.logit_rows * s.layout.logits,
    /// (T, features): what the draft stages are told of the rows.
    features: |s| s.rows * s.most(0, |draft| draft.features),
    /// (T, h4): the same through `main_proj`.
    main: |s| if s.layout.draft.is_some() { s.rows * s.layout.hidden } else { 0 },
    /// (B, V): those of a drafted block, before what the token before says.
    draft_logits: |s| s.most(0, |draft| draft.block) * s.layout.logits,
    /// (B, V): what it says, by place.
    markov: |s| s.most(0, |draft| draft.block) * s.layout.logits,
    /// (B, r): the Markov head's embeddings of the tokens before the places.
    markov_rows: |s| s.most(0, |draft| draft.block * draft.markov),
}
