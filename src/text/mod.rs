//! Text and token ids: the tokenizer, the streaming detokenizer, and the Engram constants that follow from both.

mod ngram;
mod numpy_random;
mod tokenizer;

pub use ngram::{NgramLayer, NgramTables};
pub use tokenizer::{Pieces, StreamDecoder, Tokenizer};
