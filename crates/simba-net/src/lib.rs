//! Sockets and TLS for the networked backends of Simba.
//!
//! A half-open connection must never look like silence, and TLS that was asked for must never end as plain
//! text. What both take is the same for every store, so it is here once: [`dial`] opens a socket that notices
//! when its peer is gone, [`Tls`] checks whom it talks to, [`Backoff`] spaces the tries to connect again,
//! [`Socket`] sends without a wait, [`ServerClock`] notices that a server's clock was set.

mod backoff;
mod clock_step;
mod dial;
mod place;
mod socket;
mod tls;

pub use backoff::Backoff;
pub use clock_step::{ClockReading, ClockStep, ServerClock};
pub use dial::{dial, first_to_answer};
pub use place::Place;
pub use rustls;
pub use socket::Socket;
pub use tls::{Tls, Verify};
