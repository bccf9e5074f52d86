//! Device, buffers, pipelines, recording, readback, counters. Knows no model.
//!
//! A [`Gpu`] is opened once. [`Buffer`]s hold memory of one [`MemoryKind`]; a [`Pipeline`] is one variant of one kernel
//! of the table [`SHADERS`]; a [`Bound`] is a pipeline with its buffers. A step is a [`Recording`] of dispatches and
//! copies, sent by [`Gpu::submit`] as one submission; what comes back does so through a [`ReadbackRing`].
//!
//! The first error that the device reports is kept: from then on `submit` and `read` fail with it.

mod buffer;
mod copied;
mod counters;
mod device;
mod lanes;
mod pipeline;
mod profile;
mod readback;
mod recording;
mod shaders;
mod wait;

pub use buffer::{Buffer, MemoryKind};
pub use copied::Copied;
pub use counters::Counters;
pub use device::{DeviceOptions, FeatureUse, Features, Gpu};
pub use pipeline::{Binding, Bound, Pipeline};
pub use profile::KernelTime;
pub use readback::ReadbackRing;
pub use recording::{Recording, Traffic};
pub use shaders::{
    find, BindingInfo, BindingKind, Layout, LayoutMember, MemberInfo, Needs, Shader, StructInfo, SHADERS,
};
