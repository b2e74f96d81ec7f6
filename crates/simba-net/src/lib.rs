//! The machinery that the networked backends of Simba share, and that backends in other repositories may use.
//! `examples/outside-backend`, a backend for memcached, shows how.
//!
//! | module | contents |
//! |---|---|
//! | [`Endpoint`], [`dial`], [`Tls`] | hosts, a socket that detects a dead peer, TLS that never falls back to plain text |
//! | [`supervise`] | keeps a connection open: tries endpoints, pings, backs off, publishes its state |
//! | [`batch`] | combines calls that arrive together into one request |
//! | [`queue`] | the session on a store that keeps contenders in a queue of entries |
//! | [`PerLease`] | a session for each length of lease |
//! | [`ServerClock`] | detects that a server's clock was set |
//! | [`Backoff`], [`Socket`] | pauses between attempts, writes that do not block |
//!
//! All of it runs on the engine's clock. Tests run it on virtual time.

mod backoff;
pub mod batch;
mod clock_step;
mod dial;
mod endpoint;
mod error;
mod per_lease;
pub mod queue;
mod socket;
pub mod supervise;
mod tls;

pub use backoff::Backoff;
pub use clock_step::{ClockReading, ClockStep, ServerClock};
pub use dial::{dial, first_to_answer};
pub use endpoint::Endpoint;
pub use error::closed;
pub use per_lease::PerLease;
pub use rustls;
pub use socket::Socket;
pub use tls::{Tls, Verify};
