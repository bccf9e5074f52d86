// Where pages lie. A page holds 128 tokens of the global cache, the parts of all Full layers one after the other. Pages lie in
// slabs: a slab opens with SLAB_HEADER words, the first of which is its number. A session's table names a place for each of
// its pages: the slab's number above, the page's place in the slab below.
const SLAB_HEADER: u32 = 64u;

struct PageTable {
    places: array<vec4<u32>, 2048>,
}

fn place_slab(place: u32) -> u32 {
    return place >> 16u;
}

// First word of a page in its slab.
fn place_word(place: u32, page_words: u32) -> u32 {
    return SLAB_HEADER + (place & 0xffffu) * page_words;
}
