//! Named intermediates of a forward.
