// How the lanes of a workgroup are numbered, and whether they reach each other: what the variants with SUBGROUPS build on
// and no standard promises. `gpu` runs it when a device is opened.
//
//   2 found  (SIZE, 4)  of each invocation: lanes of its subgroup; its number there; a bit for each s = 1, 2, 4, ... below
//                       the size whose lane across was invocation `local ^ s`; and which invocation is in lane `lane ^ 2`
@group(0) @binding(2) var<storage, read_write> found: array<vec4<u32>>;

@compute @workgroup_size(SIZE)
fn main(
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    var across = 0u;
    for (var s = 1u; s < size; s <<= 1u) {
        across |= select(0u, s, subgroupShuffleXor(local, s) == (local ^ s));
    }
    found[local] = vec4(size, lane, across, subgroupShuffle(local, lane ^ 2u));
}
