//! One file per WGSL kernel of the same name: its uniform struct, its bindings, its dispatch size. Knows `gpu`, no model.
//! Besides, [`tiling`] says how a selection is cut into dispatches, and [`selector`] puts its three kernels together.

pub mod attend;
pub mod boundary;
pub mod cache_append;
pub mod draft_begin;
pub mod draft_pick;
pub mod embed;
pub mod engram_gate;
pub mod engram_gather;
pub mod experts_down;
pub mod experts_up;
pub mod group_rows;
pub mod index_score;
pub mod latent_gather;
pub mod linear;
pub mod ring_commit;
pub mod route;
pub mod sample;
pub mod select;
pub mod select_merge;
pub mod selector;
pub mod tap;
pub mod tiling;
pub mod verify;

use crate::gpu::Layout;

/// State of a step on the device: twin of `Step` in `shaders/shared/step.wgsl`. It lives in one buffer, which kernels
/// bind as `step`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Step {
    /// Tokens in the cache before this step; row t has position `position + t`.
    pub position: u32,
    /// Rows in flight; 0 once generation has stopped: then every kernel does nothing.
    pub rows: u32,
    /// Tokens sampled since the last reset.
    pub sampled: u32,
    /// 0 running, 1 stopped, 2 a logit was not finite.
    pub status: u32,
    /// Low word of the generator's seed.
    pub seed_lo: u32,
    /// High word of the generator's seed.
    pub seed_hi: u32,
    /// Tokens to choose among; 0 is all.
    pub top_k: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Probability mass to choose among.
    pub top_p: f32,
    /// Stop ids to compare with.
    pub stop_count: u32,
    /// Layers of the encoder see no window key below this position.
    pub encoder_floor: u32,
    /// Layers of the decoder see no window key below this position.
    pub decoder_floor: u32,
    /// Tokens whose groups are in the pages already: an entry whose last token lies below stays as it is.
    pub kept: u32,
    /// Rounds of drafting end when so many tokens are sampled.
    pub limit: u32,
    /// Rounds of drafting since the last reset.
    pub round: u32,
    /// Reserved.
    pub p5: u32,
}

/// Every host struct that a shader reads, to be held against the shaders. [`Step`] and the tile are in several kernels; each
/// stands here under one of them.
pub fn layouts() -> Vec<Layout> {
    let mut layouts = vec![crate::layout!(
        "sample",
        Step {
            position,
            rows,
            sampled,
            status,
            seed_lo,
            seed_hi,
            top_k,
            temperature,
            top_p,
            stop_count,
            encoder_floor,
            decoder_floor,
            kept,
            limit,
            round,
            p5
        }
    )];
    layouts.extend([
        attend::layout(),
        cache_append::layout(),
        latent_gather::layout(),
        ring_commit::layout(),
        linear::layout(),
        linear::segment_layout(),
        experts_up::layout(),
        experts_up::segment_layout(),
        experts_down::layout(),
        embed::layout(),
        route::layout(),
        group_rows::layout(),
    ]);
    layouts.extend([
        boundary::layout(),
        boundary::mix_layout(),
        engram_gather::layout(),
        engram_gate::layout(),
        engram_gate::mix_layout(),
        sample::layout(),
        tap::layout(),
        draft_begin::layout(),
        draft_pick::layout(),
        verify::layout(),
        index_score::layout(),
        select::layout(),
        select_merge::layout(),
        tiling::layout(),
    ]);
    layouts
}
