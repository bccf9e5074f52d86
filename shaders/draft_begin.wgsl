// Begins a round of drafting (numerics.md §13): the block is that of the token that waits. One invocation.
//
// 2 tokens        ids of the step: the token that waits first
// 3 round         see `shared/round.wgsl`
// 4 block step    position and rows of the block; none once generation has stopped
// 5 block tokens  (B) the token that waits, then noise
#import step
#import round

struct Params {
    block: u32, // B
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> tokens: array<u32>;
@group(0) @binding(3) var<storage, read_write> round: array<u32>;
@group(0) @binding(4) var<storage, read_write> block_step: Step;
@group(0) @binding(5) var<storage, read_write> block_tokens: array<u32>;

@compute @workgroup_size(1)
fn main() {
    block_step.position = step.position;
    block_step.rows = select(0u, params.block, step.rows > 0u);
    block_tokens[0] = tokens[0];
    round[SURVIVAL] = bitcast<u32>(1.0);
    round[EXPECTED] = bitcast<u32>(1.0);
}
