// What the draft stages are told of the rows in flight (numerics.md §13): the mean over the residual streams at the input of a
// target layer's attention, into that layer's part of a row of features.
//
// An invocation makes a channel. Grid: (ceil(h / 64), rows).
//
// 2 streams   (T, n, h4)
// 3 features  (T, stride)   channels at at .. at + h
#import step

struct Params {
    hidden: u32,  // h
    padded: u32,  // h4
    streams: u32, // n
    stride: u32,
    at: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> streams: array<f32>;
@group(0) @binding(3) var<storage, read_write> features: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(global_invocation_id) id: vec3<u32>) {
    let row = group.y;
    if (row >= step.rows || id.x >= params.hidden) {
        return;
    }
    var sum = 0.0;
    for (var i = 0u; i < params.streams; i++) {
        sum += streams[(row * params.streams + i) * params.padded + id.x];
    }
    features[row * params.stride + params.at + id.x] = sum / f32(params.streams);
}
