// Copies the packed latents of each row's selected entries out of the pages, in the order of the selection: what `attend`
// reads, of the layer that selected and of those that reuse its selection.
//
// One slab is bound. Entries whose page lies in another one are left alone: a dispatch for each slab in use copies them all.
// An invocation copies a word. Grid: (most entries of a row * latent_words / 256, rows).
//
// 2 table      the session's pages
// 3 selection  (T, 1 + topk)             count, ascending entries
// 4 latents    (T, topk, latent_words)   written
// 5 slab       pages of page_words; the layer's part, from word part_at on, opens with (entries, latent_words)
#import step
#import pages

struct Params {
    topk: u32,
    latent_words: u32,
    entries: u32,     // a page
    part_at: u32,     // the layer's part of a page
    page_words: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<uniform> table: PageTable;
@group(0) @binding(3) var<storage, read> selection: array<u32>;
@group(0) @binding(4) var<storage, read_write> latents: array<u32>;
@group(0) @binding(5) var<storage, read> slab: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = id.y;
    if (row >= step.rows) {
        return;
    }
    let list = row * (1u + params.topk);
    let selected = id.x / params.latent_words;
    if (selected >= min(selection[list], params.topk)) {
        return;
    }
    let entry = selection[list + 1u + selected];
    let page = entry / params.entries;
    let place = table.places[page / 4u][page % 4u];
    if (place_slab(place) != slab[0]) {
        return;
    }
    let word = id.x % params.latent_words;
    let latent = place_word(place, params.page_words) + params.part_at + entry % params.entries * params.latent_words;
    latents[(row * params.topk + selected) * params.latent_words + word] = slab[latent + word];
}
