//! The layers, wired from kernels.
