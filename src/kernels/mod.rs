//! One file per WGSL kernel of the same name: its uniform struct, its bindings, its dispatch size. Knows `gpu`, no model.

pub mod attend;
pub mod boundary;
pub mod cache_append;
pub mod embed;
pub mod engram_gate;
pub mod engram_gather;
pub mod experts_down;
pub mod experts_up;
pub mod group_rows;
pub mod index_score;
pub mod linear;
pub mod ring_commit;
pub mod route;
pub mod sample;
pub mod select;
