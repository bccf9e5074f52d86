//! CPU twin of `select`: the best entries, and the candidate blocks (`numerics.md` §6).

use std::cmp::Reverse;
use std::ops::Range;

/// Maps a score to an integer of the same order, both zeros to one.
pub fn order_key(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 0x8000_0000
    }
}

/// Positions of the `k` best scores, ascending; among equal ones the lower position wins.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    let mut positions: Vec<u32> = (0..scores.len() as u32).collect();
    let best_first = |&p: &u32| (Reverse(order_key(scores[p as usize])), p);
    if k < positions.len() {
        positions.select_nth_unstable_by_key(k, best_first);
        positions.truncate(k);
        positions.sort_unstable();
    }
    positions
}

/// The `blocks` best blocks of `block` consecutive entries, ascending. A block's score is the best of its visible entries;
/// `scores` are those of the visible entries. The block of the newest entry is always kept, and counts.
pub fn candidate_blocks(scores: &[f32], block: usize, blocks: usize) -> Vec<u32> {
    let mut best = block_scores(scores, block);
    if let Some(newest) = best.last_mut() {
        *newest = f32::INFINITY;
    }
    top_k(&best, blocks)
}

/// The best score of each block of `block` consecutive entries.
pub fn block_scores(scores: &[f32], block: usize) -> Vec<f32> {
    scores.chunks(block).map(|block| block.iter().fold(f32::NEG_INFINITY, |m, &s| m.max(s))).collect()
}

/// Entries of candidate blocks that are visible, ascending. `visible` is their number.
pub fn candidate_entries(blocks: &[u32], block: usize, visible: usize) -> Vec<u32> {
    let entries = |&b: &u32| -> Range<u32> { b * block as u32..((b + 1) * block as u32).min(visible as u32) };
    blocks.iter().flat_map(entries).collect()
}
