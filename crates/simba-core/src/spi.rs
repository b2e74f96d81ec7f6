//! The interface for authors of backends.
//!
//! A backend implements [`Backend`] and [`Session`], and [`Operate`] if operators can list and free mutexes on it.
//! Everything else here helps to implement them: [`Wakeups`] for messages of the store, [`within`] for limits,
//! [`ConnectUrl`] for settings. The crates for the stores of this project use nothing that is not public.
//!
//! Applications need none of it: they use the names at the root of the crate.

pub use async_trait::async_trait;

pub use crate::backend::{Answer, Backend, Claim, Holding, Intent, Ownership, Prior, Session};
pub use crate::clock::within;
pub use crate::operate::Operate;
pub use crate::url::{ConnectUrl, Host, Password};
pub use crate::wakeups::{Demand, Subscription, Wakeups};
