//! Rotary embedding (`numerics.md` §4).
