//! The CPU twin of every kernel (files of the same names), and of the whole model: plain, f32, readable beside `numerics.md`.

pub mod attend;
pub mod boundary;
pub mod cache_append;
pub mod draft;
pub mod embed;
pub mod engram_gate;
pub mod engram_gather;
pub mod experts_down;
pub mod experts_up;
pub mod group_rows;
pub mod index_score;
pub mod latent_gather;
pub mod linear;
pub mod math;
pub mod model;
#[doc(hidden)]
pub mod mutation;
pub mod replay;
pub mod ring_commit;
pub mod rope;
pub mod route;
pub mod sample;
pub mod select;
pub mod sequence;
pub mod tap;
pub mod trace;
pub mod verify;
pub mod weights;
