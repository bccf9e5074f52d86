//! CPU twin of `group_rows`: pairs (row, expert) in the order in which weights are read.

/// Pairs grouped by expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups {
    /// Pair ids `row * slots + slot`, by expert, ascending within an expert.
    pub pairs: Vec<u32>,
    /// Number of tiles, then (expert, first place in `pairs`, pairs) of each; a tile holds at most the tile size.
    pub tiles: Vec<u32>,
}

/// Groups the pairs of `ids` (rows, slots), expert ids below `experts`, into tiles of at most `tile` pairs.
pub fn group(ids: &[u32], experts: usize, tile: usize) -> Groups {
    let (mut pairs, mut tiles) = (Vec::with_capacity(ids.len()), vec![0]);
    for expert in 0..experts as u32 {
        let first = pairs.len();
        pairs.extend((0..ids.len() as u32).filter(|&pair| ids[pair as usize] == expert));
        for at in (first..pairs.len()).step_by(tile) {
            tiles.extend([expert, at as u32, tile.min(pairs.len() - at) as u32]);
            tiles[0] += 1;
        }
    }
    Groups { pairs, tiles }
}
