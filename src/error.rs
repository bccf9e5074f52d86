//! The one error type of the crate. Every variant names the thing, what was found and what was allowed.

use std::path::PathBuf;

/// A result with the crate's error.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Numbers are inside, so that a caller can act on them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file is not what its name says: truncated, not JSON, a header that lies.
    #[error("{path}: {problem}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
    /// A field of `config.json` has a value that no model of the family can have.
    #[error("config field `{field}`: found {found}, allowed: {allowed}")]
    Config {
        /// Name of the field as in `config.json`.
        field: String,
        /// The value found.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A tensor is missing, unknown, misshapen or of the wrong type.
    #[error("tensor `{tensor}`: found {found}, allowed: {allowed}")]
    Tensor {
        /// Full name of the tensor.
        tensor: String,
        /// What was found.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// The tokenizer does not fit the model or cannot be read.
    #[error("tokenizer: found {found}, allowed: {allowed}")]
    Tokenizer {
        /// What was found.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A token id is not in the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocabulary} tokens")]
    TokenId {
        /// The id.
        id: u32,
        /// Number of tokens in the vocabulary.
        vocabulary: usize,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// More tokens than the context holds.
    #[error("context overrun: {needed} tokens needed, {allowed} allowed")]
    Context {
        /// Tokens that the request needs in all.
        needed: usize,
        /// Tokens that the context holds.
        allowed: usize,
    },
    /// A setting of a request is out of range.
    #[error("setting `{setting}`: found {found}, allowed: {allowed}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// The value found.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A field of a conversation is missing, or is not what it can be.
    #[error("`{field}`: found {found}, allowed: {allowed}")]
    Argument {
        /// Path of the field.
        field: String,
        /// What was found there.
        found: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A logit was NaN or infinite: the text ends here, and no token is made of it.
    #[error("non-finite logit at position {position}")]
    NonFinite {
        /// Position of the token whose successor could not be chosen.
        position: usize,
    },
    /// No usable GPU.
    #[error("no usable GPU: {looked_for}")]
    NoGpu {
        /// What was looked for and what was found.
        looked_for: String,
    },
    /// The device cannot hold or bind what the model needs.
    #[error("{what} needs {needed} bytes, the device allows {allowed}")]
    DeviceLimit {
        /// The buffer or binding.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes allowed.
        allowed: u64,
    },
    /// The device is gone: what was on it is lost, and every call fails until there is another one.
    #[error("GPU device lost ({reason}): {message}; adapter {adapter}")]
    DeviceLost {
        /// `destroyed` when it was given up on purpose, else `unknown`.
        reason: &'static str,
        /// The driver's or browser's own words; they may be none.
        message: String,
        /// The adapter that it was on.
        adapter: String,
    },
    /// The device reported an error.
    #[error("GPU device: {message}")]
    Device {
        /// The device's own words.
        message: String,
    },
    /// A session was read with another model.
    #[error("session `{session}` was saved with another {part}: found {found}, allowed: {allowed}")]
    Fingerprint {
        /// Name of the session.
        session: String,
        /// `config`, `weights` or `tokenizer`.
        part: &'static str,
        /// Fingerprint in the store.
        found: String,
        /// Fingerprint of the model at hand.
        allowed: String,
    },
    /// A session in a store is damaged beyond repair.
    #[error("session `{session}`: {problem}")]
    Session {
        /// Name of the session.
        session: String,
        /// What is missing or wrong, and what was expected.
        problem: String,
    },
    /// No session of this name.
    #[error("no session `{session}` in the store")]
    NoSession {
        /// The name asked for.
        session: String,
    },
    /// A session of this name exists already.
    #[error("session `{session}` exists already")]
    SessionExists {
        /// The name asked for.
        session: String,
    },
    /// The session was closed.
    #[error("the session is closed")]
    Closed,
    /// A session was handed to an engine that did not make it.
    #[error("the session belongs to another engine")]
    OtherEngine,
    /// A reading was stopped; the text holds what was read until then.
    #[error("stopped after {read} of {of} tokens")]
    Stopped {
        /// Tokens that were read.
        read: usize,
        /// Tokens that were to be read.
        of: usize,
    },
    /// A store failed.
    #[error("store {store}: {message}")]
    Store {
        /// Where the store is.
        store: String,
        /// Its own words.
        message: String,
    },
    /// A store has no room for what was to be saved; it has what it had.
    #[error("store {store} is full: {} bytes needed, {} left", known(*needed), known(*available))]
    StoreFull {
        /// Where the store is.
        store: String,
        /// Bytes that were still to be written, where it is known.
        needed: Option<u64>,
        /// Bytes that would still fit, where it is known.
        available: Option<u64>,
    },
    /// Another process writes to the store.
    #[error("store {store} is in use by another process")]
    StoreBusy {
        /// Where the store is.
        store: String,
    },
    /// Something that this build or device cannot do.
    #[error("not supported: {what}")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
}

/// A number of bytes for a message.
fn known(bytes: Option<u64>) -> String {
    bytes.map_or("an unknown number of".into(), |bytes| bytes.to_string())
}

impl Error {
    /// An [`Error::Io`] for `path`.
    pub fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }
    /// An [`Error::Malformed`] for `path`.
    pub fn malformed(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.into(), problem: problem.into() }
    }
    /// An [`Error::Config`].
    pub fn config(field: impl Into<String>, found: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Config { field: field.into(), found: found.to_string(), allowed: allowed.into() }
    }
    /// An [`Error::Tensor`].
    pub fn tensor(tensor: impl Into<String>, found: impl ToString, allowed: impl Into<String>) -> Self {
        Self::Tensor { tensor: tensor.into(), found: found.to_string(), allowed: allowed.into() }
    }
}
