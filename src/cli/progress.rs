//! Bars for what takes a while: on a terminal, and nothing when standard error goes elsewhere.

use indicatif::{ProgressBar, ProgressFinish, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;

/// A bar for tokens that are read: how many, how many a second, and the time left.
pub(super) fn reading(tokens: usize) -> ProgressBar {
    bar("reading {wide_bar} {human_pos}/{human_len} tokens, {speed} a second, {eta} left", tokens as u64)
}

/// A bar for bytes of weights; how many there are is set with the first.
pub(super) fn loading() -> ProgressBar {
    bar("loading {wide_bar} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}, {eta} left", 0)
}

/// A bar that goes when it is dropped, whatever ended the work.
fn bar(template: &str, length: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(template).expect("a valid template");
    let style = style.with_key("speed", |state: &ProgressState, out: &mut dyn Write| {
        // A bar has nowhere to report that it could not be written.
        let _ = write!(out, "{:.0}", state.per_sec());
    });
    ProgressBar::new(length).with_style(style).with_finish(ProgressFinish::AndClear)
}
