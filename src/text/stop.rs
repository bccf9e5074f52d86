//! Texts that end a reply, found in a text that comes in pieces.

/// Looks for stop texts. What may be the beginning of one is held back until it is clear, so nothing of a stop text ever shows, and
/// nothing else gets lost.
#[derive(Debug, Clone, Default)]
pub struct StopTexts {
    texts: Vec<String>,
    held: String,
}

impl StopTexts {
    /// Looks for these texts; none of them is empty.
    pub fn new(texts: Vec<String>) -> Self {
        debug_assert!(texts.iter().all(|text| !text.is_empty()));
        Self { texts, held: String::new() }
    }

    /// Takes one more piece, gives what may be shown, and whether a stop text was found behind it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let mut all = std::mem::take(&mut self.held);
        if let Some(at) = self.texts.iter().filter_map(|text| all.find(text)).min() {
            all.truncate(at);
            return (all, true);
        }
        let keep = self.texts.iter().map(|text| overlap(&all, text)).max().unwrap_or(0);
        self.held = all.split_off(all.len() - keep);
        (all, false)
    }

    /// Whether nothing is held back.
    pub fn is_clear(&self) -> bool {
        self.held.is_empty()
    }

    /// What was held back, once no more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that `stop` begins with and goes on from.
fn overlap(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(at, _)| at).skip(1);
    ends.filter(|&at| text.ends_with(&stop[..at])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is shown of a text in pieces, and whether it was stopped.
    fn shown(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopTexts::new(stops.iter().map(|stop| stop.to_string()).collect());
        let mut shown = String::new();
        for piece in pieces {
            let (text, stopped) = matcher.push(piece);
            shown += &text;
            if stopped {
                return (shown, true);
            }
        }
        shown += &matcher.finish();
        (shown, false)
    }

    #[test]
    fn a_stop_text_is_found_wherever_the_pieces_end() {
        let text = "eins, zwéi; END und mehr";
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for &a in &cuts {
            for &b in cuts.iter().filter(|&&b| b >= a) {
                let pieces = [&text[..a], &text[a..b], &text[b..]];
                assert_eq!(shown(&["END"], &pieces), ("eins, zwéi; ".into(), true), "{pieces:?}");
                assert_eq!(shown(&["ENDE", "i; EN", "ER"], &pieces), ("eins, zwé".into(), true), "{pieces:?}");
                assert_eq!(shown(&["ENDE", "mehr!"], &pieces), (text.into(), false), "{pieces:?}");
            }
        }
    }

    #[test]
    fn what_may_begin_a_stop_text_waits() {
        let mut matcher = StopTexts::new(vec!["\n\n".into()]);
        assert_eq!(matcher.push("a\n"), ("a".into(), false));
        assert_eq!(matcher.push("b\n"), ("\nb".into(), false));
        assert_eq!(matcher.push("\nc"), (String::new(), true));
        assert_eq!(matcher.finish(), "");
        assert_eq!(matcher.push("d\n"), ("d".into(), false));
        assert_eq!(matcher.finish(), "\n");
    }
}
