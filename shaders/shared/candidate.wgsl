// Slots of a row's candidate list that hold a visible entry: a prefix, because block ids ascend and every block but the
// newest is complete. Slot s is entry list[s / block_size] * block_size + s % block_size.
fn candidate_slots(count: u32, newest: u32, block_size: u32, visible: u32) -> u32 {
    if count == 0u {
        return 0u;
    }
    return (count - 1u) * block_size + min(block_size, visible - newest * block_size);
}
