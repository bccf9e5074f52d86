//! A session's state on the device.
