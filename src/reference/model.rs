//! The whole model on the CPU.
