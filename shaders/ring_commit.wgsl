// Copies the rows of a step that later tokens can see, the last min(T, W), from the chunk into the window ring. Recorded
// only for steps of several rows, after `attend`: a single row is written into the ring at once.
//
// An invocation copies a word. Grid: (min(T, W) * row words / 256).
//
// 2 chunk  (T, row words)  packed window keys of the step, by row
// 3 ring   (slots, row words)  packed window keys, slot position % slots
#import step

struct Params {
    row_words: u32,
    slots: u32,  // of the ring
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> chunk: array<u32>;
@group(0) @binding(3) var<storage, read_write> ring: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let count = min(step.rows, params.slots);
    // A single row is in the ring already.
    if (step.rows < 2u || id.x >= count * params.row_words) {
        return;
    }
    let row = step.rows - count + id.x / params.row_words;
    let word = id.x % params.row_words;
    ring[(step.position + row) % params.slots * params.row_words + word] = chunk[row * params.row_words + word];
}
