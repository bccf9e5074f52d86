//! CPU twin of `ring_commit`.

/// Copies the rows of a chunk that later tokens can see, the last `min(T, W)`, into the ring: position p lies in slot
/// `p % W`. `ring` is (W, width), `chunk` (T, width); the chunk's first row has position `position`.
pub fn commit<T: Copy>(ring: &mut [T], chunk: &[T], width: usize, position: usize) {
    let (window, rows) = (ring.len() / width, chunk.len() / width);
    for t in rows.saturating_sub(window)..rows {
        let slot = (position + t) % window;
        ring[slot * width..][..width].copy_from_slice(&chunk[t * width..][..width]);
    }
}
