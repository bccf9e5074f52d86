//! Text and token ids: the tokenizer, the streaming detokenizer, conversations, and the Engram constants that follow from
//! config and tokenizer.

mod chat;
mod ngram;
mod numpy_random;
mod tokenizer;

pub use chat::{Chat, Delta, Prompt, Reply};
pub use ngram::{NgramLayer, NgramTables};
pub use tokenizer::{Pieces, StreamDecoder, Tokenizer};
