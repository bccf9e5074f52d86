//! Which rows of a text each layer runs when it is read, and when a session is rebuilt (`numerics.md` §11).
//!
//! A text's last token is never read ahead: its logits choose the next token, so the step that makes that token reads it,
//! through all layers. What is planned here are the rows before it.

use crate::config::{Config, LayerPlan, Role};

/// How a prompt is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefill {
    /// The encoder reads every token; the decoder the last `sliding_window` tokens of what is appended, and no window key before
    /// them. Approximate, at half the work.
    #[default]
    Bounded,
    /// As if every layer had run for every token, at the least work that gives exactly that: each layer runs the rows that what
    /// follows depends on.
    Exact,
    /// Every layer runs every token.
    Full,
}

impl Prefill {
    /// How windows are rebuilt that such a reading needs and does not find: what goes on exactly must begin exactly.
    pub fn replay(self) -> Replay {
        match self {
            Self::Bounded | Self::Full => Replay::Bounded,
            Self::Exact => Replay::Exact,
        }
    }
}

/// How the state behind a text is rebuilt when only its global cache was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Replay {
    /// The last `sliding_window` tokens run through all layers, seeing no window key before them. Approximate.
    #[default]
    Bounded,
    /// All rows that the state depends on, through as many layers as it takes: what an exact reading would have left.
    Exact,
}

/// What a layer does with rows whose output nobody needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Adds their global entries.
    Entries,
    /// Adds their global entries and window keys.
    Keys,
}

/// How deep rows go: layers before `whole` run them whole, layer `whole` does a part, if any; the rest does not see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    /// Layers that run the rows whole.
    pub whole: usize,
    /// What layer `whole` does with them.
    pub part: Option<Part>,
}

impl Depth {
    /// Every layer of a model.
    pub fn all(config: &Config) -> Self {
        Self { whole: config.layers.len(), part: None }
    }
}

/// Rows `start..end` of a text, all of one depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Position of the first row.
    pub start: usize,
    /// Position after the last row.
    pub end: usize,
    /// How deep they go.
    pub depth: Depth,
}

/// Lowest positions whose window keys may be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Floors {
    /// By layers of the encoder.
    pub encoder: usize,
    /// By layers of the decoder.
    pub decoder: usize,
}

/// Rows to run, in order, and the floors that hold while they run and from then on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// Spans that follow each other, none of them empty.
    pub spans: Vec<Span>,
    /// The floors.
    pub floors: Floors,
}

impl Reading {
    /// The rows `start..end - 1` of a text of `end` tokens, all of which but the last are read now. `floors` are those so far.
    pub fn append(config: &Config, prefill: Prefill, floors: Floors, start: usize, end: usize) -> Self {
        let decoder = config.decoder();
        let entries = Depth { whole: decoder, part: Some(Part::Entries) };
        let last = end.saturating_sub(1);
        let tail = end.saturating_sub(config.sliding_window).max(start);
        match prefill {
            _ if decoder == config.layers.len() => Self { spans: whole(config, start, last), floors },
            Prefill::Full => Self { spans: whole(config, start, last), floors },
            Prefill::Bounded if tail == start => Self { spans: whole(config, start, last), floors },
            Prefill::Bounded => {
                let mut spans = vec![Span { start, end: tail, depth: entries }];
                spans.extend(whole(config, tail, last));
                Self { spans, floors: Floors { decoder: tail, ..floors } }
            }
            Prefill::Exact => {
                let mut spans = cone(config, decoder, start, end, |_| end);
                let first = spans.first().map_or(last, |span| span.start);
                if start < first {
                    spans.insert(0, Span { start, end: first, depth: entries });
                }
                Self { spans, floors }
            }
        }
    }

    /// The rows of a text of `end` tokens that rebuild what is not kept, all before its last token. Entries of groups that end
    /// before position `kept`, at most `end`, are in the pages and stay as they are.
    pub fn replay(config: &Config, replay: Replay, end: usize, kept: usize) -> Self {
        match replay {
            Replay::Bounded => {
                let groups = config.layers.iter().filter(|layer| layer.role == Role::Full);
                let open = groups.map(|layer| kept / layer.ratio * layer.ratio).min().unwrap_or(end);
                let start = end.saturating_sub(config.sliding_window).min(open);
                let spans = whole(config, start, end.saturating_sub(1));
                Self { spans, floors: Floors { encoder: start, decoder: start } }
            }
            Replay::Exact => {
                let open =
                    |plan: &LayerPlan| if plan.role == Role::Full { kept / plan.ratio * plan.ratio } else { end };
                Self { spans: cone(config, 0, 0, end, open), floors: Floors::default() }
            }
        }
    }

    /// Whether it begins with rows that the decoder does not run, and has all rows that those of the decoder behind them look
    /// back at: windows of the decoder from before it are not needed.
    pub fn begins_below_decoder(&self, config: &Config) -> bool {
        let below = Depth { whole: config.decoder(), part: Some(Part::Entries) };
        self.spans.first().is_some_and(|span| span.depth == below)
    }

    /// Rows in all.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.end - span.start).sum()
    }
}

/// `start..end` through all layers.
fn whole(config: &Config, start: usize, end: usize) -> Vec<Span> {
    if start < end {
        vec![Span { start, end, depth: Depth::all(config) }]
    } else {
        vec![]
    }
}

/// The rows from `lowest` on, before the last of `end`, on which that one depends through layers from `first` on. A layer's row
/// sees `sliding_window - 1` keys before its own, so each layer needs that many rows more than the one above it; and a layer
/// needs the inputs of all rows from `open` on, if that is less, for its entries.
fn cone(config: &Config, first: usize, lowest: usize, end: usize, open: impl Fn(&LayerPlan) -> usize) -> Vec<Span> {
    let mut spans = vec![];
    let mut above = end.saturating_sub(1);
    for (whole, plan) in config.layers.iter().enumerate().skip(first).rev() {
        let keys = above.saturating_sub(config.sliding_window - 1).max(lowest).min(above);
        let start = open(plan).max(lowest).min(keys);
        for (start, end, part) in [(keys, above, Part::Keys), (start, keys, Part::Entries)] {
            if start < end {
                spans.push(Span { start, end, depth: Depth { whole, part: Some(part) } });
            }
        }
        above = start;
    }
    spans.reverse();
    spans
}
