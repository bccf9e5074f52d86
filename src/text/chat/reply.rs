//! A reply, token by token: what of it is reasoning, what is said, what is called.
//!
//! Markers are made of control tokens and text. A control token's part of a marker is only matched by the control token itself,
//! never by text that spells it.

use super::{json, Control};
use crate::text::{Pieces, Tokenizer};
use crate::Result;

/// What a piece of a reply adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Reasoning.
    Reasoning(String),
    /// What is said.
    Content(String),
    /// A call begins.
    Call {
        /// Its number in the reply, from 0.
        index: usize,
        /// The function.
        name: String,
    },
    /// More of a call's arguments. Together they are JSON, as far as the reply got and the model kept to the form.
    Arguments {
        /// The call's number.
        index: usize,
        /// The JSON that is added.
        text: String,
    },
}

/// Where a reply begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// With what is said.
    Reply,
    /// With reasoning.
    Reasoning,
    /// In the middle of reasoning.
    MoreReasoning,
    /// In the middle of what is said.
    Content,
    /// Within the calls.
    Calls,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Reasoning,
    Content,
    /// Between calls.
    Calls,
    Name,
    /// Between arguments; whether there has been one.
    Arguments(bool),
    Key,
    /// Between an argument's name and its value.
    Kind,
    /// Whether the value is a string.
    Value(bool),
    /// Whatever comes behind the calls is dropped.
    Over,
}

/// A byte, and whether it is a control token's.
type Unit = (u8, bool);

/// What is looked for.
struct Marker {
    units: Vec<Unit>,
    /// Whether newlines before it belong to it.
    newlines: bool,
    then: Then,
}

#[derive(Debug, Clone, Copy)]
enum Then {
    /// The reasoning is over.
    Say,
    /// A mark that means nothing here.
    Drop,
    Calls,
    Call,
    Named,
    Argument,
    EndCall,
    Keyed,
    Value(bool),
    EndValue,
    Over,
}

/// Listens to a reply.
#[derive(Debug)]
pub struct Reply {
    stage: Stage,
    /// Whether newlines are dropped until something else comes.
    trims: bool,
    /// Whether calls are looked for.
    calls: bool,
    /// Calls that have begun.
    begun: usize,
    /// What may be a marker's beginning.
    held: Vec<Unit>,
    name: String,
    /// Bytes of a character that has not come whole.
    pieces: Pieces,
}

impl Reply {
    pub(super) fn new(start: Start, calls: bool) -> Self {
        let stage = match start {
            Start::Reply | Start::Content => Stage::Content,
            Start::Reasoning | Start::MoreReasoning => Stage::Reasoning,
            Start::Calls => Stage::Calls,
        };
        let trims = matches!(start, Start::Reply | Start::Reasoning);
        Self { stage, trims, calls, begun: 0, held: vec![], name: String::new(), pieces: Pieces::default() }
    }

    /// Takes a token of the reply.
    ///
    /// # Errors
    /// For an id that the vocabulary does not have.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<Vec<Delta>> {
        let bytes = tokenizer.bytes(id)?;
        let mut deltas = vec![];
        if tokenizer.is_added(id) {
            let before = std::mem::take(&mut self.pieces).finish();
            self.text(&before, false, &mut deltas);
            self.text(&String::from_utf8_lossy(bytes), true, &mut deltas);
        } else {
            let text = self.pieces.push(bytes);
            self.text(&text, false, &mut deltas);
        }
        Ok(deltas)
    }

    /// Whether nothing is held back.
    pub fn is_clear(&self) -> bool {
        self.held.is_empty() && self.pieces.is_empty()
    }

    /// The reply is over: what was held back. A call that was not ended stays as it is.
    pub fn finish(&mut self) -> Vec<Delta> {
        let mut deltas = vec![];
        let rest = std::mem::take(&mut self.pieces).finish();
        self.text(&rest, false, &mut deltas);
        let held = std::mem::take(&mut self.held);
        self.show(&held, &mut deltas);
        deltas
    }

    fn text(&mut self, text: &str, control: bool, deltas: &mut Vec<Delta>) {
        let mut markers = self.markers();
        for byte in text.bytes() {
            if byte == b'\n' && self.trims && self.held.is_empty() {
                continue;
            }
            self.held.push((byte, control));
            let Some(marker) = markers.iter().find(|marker| self.held.ends_with(&marker.units)) else { continue };
            let mut before = self.held.len() - marker.units.len();
            while marker.newlines && before > 0 && self.held[before - 1].0 == b'\n' {
                before -= 1;
            }
            let then = marker.then;
            let held = std::mem::take(&mut self.held);
            self.show(&held[..before], deltas);
            self.turn(then, deltas);
            markers = self.markers();
        }
        let keep = markers.iter().map(|marker| marker.begun(&self.held)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        let shown = std::mem::replace(&mut self.held, rest);
        self.show(&shown, deltas);
    }

    fn markers(&self) -> Vec<Marker> {
        let dsml = Control::Dsml.text();
        let marker = |parts: &[(&str, bool)], newlines, then| Marker {
            units: parts.iter().flat_map(|(text, control)| text.bytes().map(|byte| (byte, *control))).collect(),
            newlines,
            then,
        };
        let text = |text, then| marker(&[(text, false)], false, then);
        let end_think = [(Control::EndThink.text(), true)];
        let open = [("<", false), (dsml, true)];
        let close = [("</", false), (dsml, true)];
        let close_calls = [("</", false), (dsml, true), (" calls>", false)];
        let calls = self.calls.then(|| marker(&open, true, Then::Calls));
        match self.stage {
            Stage::Reasoning => calls.into_iter().chain([marker(&end_think, true, Then::Say)]).collect(),
            Stage::Content => calls.into_iter().chain([marker(&end_think, false, Then::Drop)]).collect(),
            Stage::Calls => vec![text("invoke name=\"", Then::Call), marker(&close_calls, false, Then::Over)],
            Stage::Name => vec![text("\"", Then::Named)],
            Stage::Arguments(_) => {
                vec![text("parameter name=\"", Then::Argument), marker(&close, false, Then::EndCall)]
            }
            Stage::Key => vec![text("\"", Then::Keyed)],
            Stage::Kind => vec![text("true\">", Then::Value(true)), text("false\">", Then::Value(false))],
            Stage::Value(_) => vec![marker(&close, false, Then::EndValue)],
            Stage::Over => vec![],
        }
    }

    /// What a marker does.
    fn turn(&mut self, then: Then, deltas: &mut Vec<Delta>) {
        self.trims = matches!(then, Then::Say);
        self.stage = match then {
            Then::Say | Then::Drop => Stage::Content,
            Then::Calls => Stage::Calls,
            Then::Call => {
                self.name.clear();
                Stage::Name
            }
            Then::Named => {
                deltas.push(Delta::Call { index: self.begun, name: std::mem::take(&mut self.name) });
                self.begun += 1;
                Stage::Arguments(false)
            }
            Then::Argument => {
                let more = self.stage == Stage::Arguments(true);
                self.arguments(if more { ", \"" } else { "{\"" }, deltas);
                Stage::Key
            }
            Then::EndCall => {
                let some = self.stage == Stage::Arguments(true);
                self.arguments(if some { "}" } else { "{}" }, deltas);
                Stage::Calls
            }
            Then::Keyed => {
                self.arguments("\": ", deltas);
                Stage::Kind
            }
            Then::Value(string) => {
                self.arguments(if string { "\"" } else { "" }, deltas);
                Stage::Value(string)
            }
            Then::EndValue => {
                self.arguments(if self.stage == Stage::Value(true) { "\"" } else { "" }, deltas);
                Stage::Arguments(true)
            }
            Then::Over => Stage::Over,
        };
    }

    /// Text between markers.
    fn show(&mut self, units: &[Unit], deltas: &mut Vec<Delta>) {
        if units.is_empty() {
            return;
        }
        self.trims = false;
        let bytes: Vec<u8> = units.iter().map(|(byte, _)| *byte).collect();
        let text = String::from_utf8_lossy(&bytes);
        match (self.stage, deltas.last_mut()) {
            (Stage::Content, Some(Delta::Content(before))) | (Stage::Reasoning, Some(Delta::Reasoning(before))) => {
                before.push_str(&text);
            }
            (Stage::Content, _) => deltas.push(Delta::Content(text.into())),
            (Stage::Reasoning, _) => deltas.push(Delta::Reasoning(text.into())),
            (Stage::Name, _) => self.name.push_str(&text),
            (Stage::Key | Stage::Value(true), _) => {
                let quoted = json::quoted(&text);
                self.arguments(&quoted[1..quoted.len() - 1], deltas);
            }
            (Stage::Value(false), _) => self.arguments(&text, deltas),
            (Stage::Calls | Stage::Arguments(_) | Stage::Kind | Stage::Over, _) => {}
        }
    }

    /// More arguments of the last call.
    fn arguments(&self, more: &str, deltas: &mut Vec<Delta>) {
        match deltas.last_mut() {
            _ if more.is_empty() => {}
            Some(Delta::Arguments { text, .. }) => text.push_str(more),
            _ => deltas.push(Delta::Arguments { index: self.begun - 1, text: more.into() }),
        }
    }
}

impl Marker {
    /// Bytes at the end of `held` that may be the marker's beginning.
    fn begun(&self, held: &[Unit]) -> usize {
        let longest = held.len().min(self.units.len() - 1);
        let mut part = (0..=longest).rev().find(|&part| held.ends_with(&self.units[..part])).unwrap_or(0);
        while self.newlines && part < held.len() && held[held.len() - part - 1] == (b'\n', false) {
            part += 1;
        }
        part
    }
}
