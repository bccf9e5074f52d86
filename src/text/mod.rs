//! Tokenizer, streaming detokenizer, Engram tables.
