//! A conversation that grows where its text is kept: what has to be read next, and where it is cut to take something back.
//!
//! [`Chat`](super::Chat) encodes messages. Here the tokens are the record, and nothing is kept beside them: control tokens, which no
//! message can spell, tell turns apart, so that a conversation is known again in another process. A question follows the documents of
//! its turn after a blank line and has no blank line itself. The end of a document and the beginning of a question are encoded apart:
//! what follows a document never changes the document's tokens.

use super::{reply, Control, Reply};
use crate::text::Tokenizer;
use crate::Result;

/// What separates the parts of a turn.
const BLANK_LINE: &str = "\n\n";

/// The control tokens of a model's conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Talk {
    bos: u32,
    eos: u32,
    user: u32,
    assistant: u32,
    end_think: u32,
    system: Option<u32>,
}

/// Where a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Before a turn of the user.
    Between,
    /// In a turn of the user that has said nothing.
    Begun,
    /// In a turn of the user.
    User,
    /// In an answer that was not ended.
    Answer,
}

impl Talk {
    /// The control tokens of this tokenizer.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::Error::Tokenizer) for one that the vocabulary lacks.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let id = |control: Control| control.id(tokenizer);
        Ok(Self {
            bos: id(Control::Bos)?,
            eos: id(Control::Eos)?,
            user: id(Control::User)?,
            assistant: id(Control::Assistant)?,
            end_think: id(Control::EndThink)?,
            system: id(Control::System).ok(),
        })
    }

    /// Tokens that end an answer: its own end, and whatever begins what is no answer.
    pub fn stop_ids(&self) -> Vec<u32> {
        [self.eos, self.bos, self.user, self.assistant].into_iter().chain(self.system).collect()
    }

    /// Whether an answer ends with this token of its own accord.
    pub fn ends(&self, id: u32) -> bool {
        id == self.eos
    }

    /// What listens to an answer.
    pub fn reply(&self) -> Reply {
        Reply::new(reply::Start::Reply, false)
    }

    /// What `text` reads next when it is told a document. One that follows others in its turn is headed by its title.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn load(&self, tokenizer: &Tokenizer, text: &[u32], title: &str, document: &str) -> Result<Vec<u32>> {
        let (end, mut ids) = self.open(text);
        match end {
            End::User => ids.extend(tokenizer.encode(&format!("{BLANK_LINE}# {title}{BLANK_LINE}{document}"))?),
            _ => ids.extend(tokenizer.encode(document)?),
        }
        Ok(ids)
    }

    /// What `text` reads next when it is asked a question, up to where the answer begins. Blank lines of the question go.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn ask(&self, tokenizer: &Tokenizer, text: &[u32], question: &str) -> Result<Vec<u32>> {
        let lines: Vec<&str> = question.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
        let question = lines.join("\n");
        let (end, mut ids) = self.open(text);
        match end {
            End::User => ids.extend(tokenizer.encode(&format!("{BLANK_LINE}{question}"))?),
            _ => ids.extend(tokenizer.encode(&question)?),
        }
        ids.extend([self.assistant, self.end_think]);
        Ok(ids)
    }

    /// The length to which `text` is cut to take back what was said last: a question with its answer, or, where no question follows
    /// them, the documents that were told last. None where there is nothing to take back.
    ///
    /// # Errors
    /// For an id that the vocabulary does not have.
    pub fn undo(&self, tokenizer: &Tokenizer, text: &[u32]) -> Result<Option<usize>> {
        let Some(turn) = text.iter().rposition(|&id| id == self.user) else { return Ok(None) };
        let Some(said) = text[turn..].iter().position(|&id| id == self.assistant) else { return Ok(Some(turn)) };
        let said = &text[turn + 1..turn + said];
        // From the end: the first blank line found there is the last.
        for at in (1..said.len()).rev() {
            let mut bytes = vec![];
            for &id in &said[at..] {
                bytes.extend_from_slice(tokenizer.bytes(id)?);
                if bytes.len() >= BLANK_LINE.len() {
                    break;
                }
            }
            if bytes.starts_with(BLANK_LINE.as_bytes()) {
                return Ok(Some(turn + 1 + at));
            }
        }
        Ok(Some(turn))
    }

    /// Where a text ends, and what opens a turn of the user there.
    fn open(&self, text: &[u32]) -> (End, Vec<u32>) {
        let end = self.end(text);
        let ids = match end {
            End::Between if text.is_empty() => vec![self.bos, self.user],
            End::Between => vec![self.user],
            End::Begun | End::User => vec![],
            End::Answer => vec![self.eos, self.user],
        };
        (end, ids)
    }

    fn end(&self, text: &[u32]) -> End {
        match text.iter().rev().find(|id| [self.user, self.assistant, self.eos].contains(id)) {
            Some(&id) if id == self.assistant => End::Answer,
            Some(&id) if id == self.user && text.last() == Some(&id) => End::Begun,
            Some(&id) if id == self.user => End::User,
            _ => End::Between,
        }
    }
}
