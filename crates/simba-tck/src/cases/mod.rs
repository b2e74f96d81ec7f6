//! The cases, one module per group, each a function that panics if its guarantee is broken.
//!
//! [`suite!`](crate::suite) expands them to tests and [`cases()`](crate::cases()) lists them; they can also be called
//! one by one.

#![allow(clippy::unwrap_used)]

pub mod cancellation;
pub mod exclusion;
pub mod faults;
pub mod handover;
pub mod jvm_simba;
pub mod lifecycle;
pub mod load;
pub mod loss;
pub mod names;
pub mod observer;
pub mod operate;
pub mod renewal;
pub mod session;
pub mod tokens;
