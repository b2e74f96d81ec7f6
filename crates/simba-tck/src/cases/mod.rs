//! The cases, one module per group, each a function that panics if its promise is broken.
//!
//! [`suite!`](crate::suite) makes tests of them and [`cases()`](crate::cases()) lists them; they can also be
//! called one by one.

#![allow(clippy::unwrap_used)]

pub mod cancellation;
pub mod exclusion;
pub mod faults;
pub mod handover;
pub mod lifecycle;
pub mod load;
pub mod loss;
pub mod names;
pub mod observer;
pub mod operate;
pub mod renewal;
pub mod seeds;
pub mod session;
pub mod tokens;
