//! Every kernel against its CPU twin, with random shapes. One module per kernel.

mod common;
mod pool;

mod attend;
mod boundary;
mod cache_append;
mod embed;
mod engram_gate;
mod engram_gather;
mod experts;
mod group_rows;
mod index_score;
mod latent_gather;
mod layout;
mod linear;
mod ring_commit;
mod round;
mod route;
mod sample;
mod select;
mod select_merge;
mod selector;
mod tap;
