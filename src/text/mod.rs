//! Text and token ids: the tokenizer, the streaming detokenizer, conversations, and the Engram constants that follow from
//! config and tokenizer.

mod chat;
mod ngram;
mod numpy_random;
mod stop;
mod tokenizer;

pub use chat::{Chat, Delta, Prompt, Reply, Talk};
pub use ngram::{NgramLayer, NgramTables};
pub use stop::StopTexts;
pub use tokenizer::{Pieces, StreamDecoder, Tokenizer};
