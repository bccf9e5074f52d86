//! Models that are wrong on purpose. Each variant is a slip that an implementation of this family can make and still
//! write fluent text; `tests/mutations.rs` holds that the recorded reference tells every one of them from the real model.

/// One slip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// The query latent is not normed.
    NoQueryNorm,
    /// The window key is not normed.
    NoWindowKeyNorm,
    /// The index key is not normed.
    NoIndexKeyNorm,
    /// Query heads are normed one by one, as in the family before.
    QueryNormPerHead,
    /// A sublayer collapses the streams with its own `pre`, not with the one before.
    PreWithoutLag,
    /// The stream mix is read as [out, in].
    CombTransposed,
    /// The output of attention is not rotated back.
    NoInverseRope,
    /// An entry's position is the last of its group.
    EntryAtGroupEnd,
    /// The newest complete group is not visible.
    VisibleOneFewer,
    /// An incomplete group is visible.
    VisibleIncomplete,
    /// The index key is made from the rotated latent.
    IndexKeyFromEntry,
    /// Index scores keep negative dot products.
    ScoreWithoutRelu,
    /// The newest candidate block is kept only if its score is good enough.
    NewestBlockNotForced,
    /// A layer restricted to candidates scores everything.
    CandidatesIgnored,
    /// The chosen experts' weights contain the selection bias.
    BiasInRouteWeight,
    /// The experts' gate is clamped from below too.
    GateClampedBelow,
}
