//! CPU twin of `latent_gather`.

/// The packed latents of a row's selected entries, one after the other. `latents` is (entries, `width`).
pub fn gather<T: Copy>(latents: &[T], width: usize, selected: &[u32]) -> Vec<T> {
    selected.iter().flat_map(|&entry| &latents[entry as usize * width..][..width]).copied().collect()
}
