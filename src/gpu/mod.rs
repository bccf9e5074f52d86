//! Device, buffers, pipelines, recording, readback, counters. Knows no model.
