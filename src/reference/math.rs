//! Small vector operations that every twin uses.
