//! The layers, wired from kernels.

pub mod pack;
