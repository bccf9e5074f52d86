//! The four kinds of records. Each begins with its kind; the hash that names it says whether it is whole.

use super::bytes::{Input, Output};
use super::Geometry;

const TOKENS: u32 = u32::from_le_bytes(*b"CTOK");
const PAGES: u32 = u32::from_le_bytes(*b"CPAG");
const TAIL: u32 = u32::from_le_bytes(*b"CEND");
const STATE: u32 = u32::from_le_bytes(*b"CSTA");

/// Bytes of a record of `count` tokens.
pub(super) fn tokens_bytes(count: u64) -> u64 {
    8 + 4 * count
}

/// Bytes of a record of `count` pages.
pub(super) fn pages_bytes(geometry: &Geometry, count: u64) -> u64 {
    12 + count * page_bytes(geometry)
}

/// Bytes of a page in a record, with its tokens.
pub(super) fn page_bytes(geometry: &Geometry) -> u64 {
    4 * (u64::from(geometry.page_tokens) + u64::from(geometry.page_words))
}

pub(super) fn write_tokens(tokens: &[u32]) -> Vec<u8> {
    let mut out = Output::default();
    out.u32(TOKENS);
    out.u32(tokens.len() as u32);
    out.words(tokens);
    out.0
}

pub(super) fn read_tokens(bytes: &[u8], count: usize) -> Option<Vec<u32>> {
    let mut input = Input(bytes);
    let found = (input.u32()?, input.u32()? as usize);
    let tokens = (found == (TOKENS, count)).then(|| input.words(count))??;
    input.done().map(|()| tokens)
}

/// The head of a page record; the pages follow, each as [`write_page`] writes it.
pub(super) fn write_pages(geometry: &Geometry, count: usize) -> Output {
    let mut out = Output::default();
    out.u32(PAGES);
    out.u32(count as u32);
    out.u32(geometry.page_words);
    out
}

pub(super) fn write_page(out: &mut Output, tokens: &[u32], words: &[u32]) {
    out.words(tokens);
    out.words(words);
}

/// Tokens and words of `count` complete pages.
pub(super) fn read_pages(bytes: &[u8], geometry: &Geometry, count: usize) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut input = Input(bytes);
    let found = (input.u32()?, input.u32()? as usize, input.u32()?);
    if found != (PAGES, count, geometry.page_words) || bytes.len() as u64 != pages_bytes(geometry, count as u64) {
        return None;
    }
    let (mut tokens, mut words) = (vec![], vec![]);
    for _ in 0..count {
        tokens.extend(input.words(geometry.page_tokens as usize)?);
        words.extend(input.words(geometry.page_words as usize)?);
    }
    input.done().map(|()| (tokens, words))
}

/// The tokens after the last complete page, and the page that has begun with them, if it has.
pub(super) fn write_tail(tokens: &[u32], page: Option<&[u32]>) -> Vec<u8> {
    let mut out = Output::default();
    let page = page.unwrap_or_default();
    out.u32(TAIL);
    out.u32(tokens.len() as u32);
    out.u32(page.len() as u32);
    write_page(&mut out, tokens, page);
    out.0
}

/// Tokens, and the words of the page; none when no page has begun.
pub(super) fn read_tail(bytes: &[u8], tokens: usize, page_words: usize) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut input = Input(bytes);
    let found = (input.u32()?, input.u32()? as usize, input.u32()? as usize);
    let tail =
        (found == (TAIL, tokens, page_words)).then(|| Some((input.words(tokens)?, input.words(page_words)?)))??;
    input.done().map(|()| tail)
}

/// What a session knows besides its text and its pages.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Incomplete groups of the Full layers with a ratio above 1, in order: (ratio - 1, 2, D) f32 each.
    pub remainders: Vec<f32>,
    /// Raw ids before the next step, newest first.
    pub history: Vec<u32>,
    /// Window rings of all layers, in order: (W, packed window key) each. None when they were not saved.
    pub rings: Option<Vec<u32>>,
    /// What the draft stages see of the text. None when it was not saved.
    pub draft: Option<DraftWindow>,
}

/// What the draft stages see of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftWindow {
    /// Lowest position whose keys may be seen.
    pub floor: u32,
    /// Rings of all stages, in order: (W, packed window key) each.
    pub rings: Vec<u32>,
}

impl State {
    /// Whether the parts have the lengths that the geometry gives them.
    pub(super) fn fits(&self, geometry: &Geometry) -> bool {
        self.remainders.len() as u64 == geometry.remainder_words()
            && self.history.len() == geometry.history as usize
            && self.rings.as_ref().is_none_or(|rings| rings.len() as u64 == geometry.ring_words())
            && self.draft.as_ref().is_none_or(|draft| geometry.are_rings(draft.rings.len() as u64))
    }
}

/// Bytes of a record of this state.
pub(super) fn state_bytes(state: &State) -> u64 {
    let rings = state.rings.as_ref().map_or(0, Vec::len);
    let draft = state.draft.as_ref().map_or(0, |draft| 2 + draft.rings.len());
    16 + 4 * (state.remainders.len() + state.history.len() + rings + draft) as u64
}

pub(super) fn write_state(state: &State) -> Vec<u8> {
    let mut out = Output::default();
    let rings = state.rings.as_deref().unwrap_or_default();
    out.u32(STATE);
    out.u32(state.remainders.len() as u32);
    out.u32(state.history.len() as u32);
    out.u32(rings.len() as u32);
    out.words(bytemuck::cast_slice(&state.remainders));
    out.words(&state.history);
    out.words(rings);
    if let Some(DraftWindow { floor, rings }) = &state.draft {
        out.u32(*floor);
        out.u32(rings.len() as u32);
        out.words(rings);
    }
    out.0
}

/// `with_rings` and `with_draft` say whether the record has the window rings, and the draft stages'.
pub(super) fn read_state(bytes: &[u8], geometry: &Geometry, with_rings: bool, with_draft: bool) -> Option<State> {
    let mut input = Input(bytes);
    if input.u32()? != STATE {
        return None;
    }
    let [remainders, history, rings] = [input.u32()?, input.u32()?, input.u32()?].map(|n| n as usize);
    let remainders = bytemuck::cast_slice(&input.words(remainders)?).to_vec();
    let (history, rings) = (input.words(history)?, input.words(rings)?);
    let draft = match with_draft {
        true => {
            let (floor, words) = (input.u32()?, input.u32()? as usize);
            Some(DraftWindow { floor, rings: input.words(words)? })
        }
        false => None,
    };
    let state = State { remainders, history, rings: with_rings.then_some(rings), draft };
    (input.done().is_some() && state.fits(geometry)).then_some(state)
}
