//! The conformance suite for Simba backends: the guarantees of every store, as tests against the real store.
//!
//! A backend author implements one trait, [`Fixture`], and writes one line, [`suite!`]. The line expands to one
//! `#[test]` per guarantee, each with its own tokio runtime.
//!
//! # Example
//!
//! A fixture returns connections, as several processes would have, each with a network that can inject faults.
//! This is the whole of `tests/tck.rs` for a store within the process; in front of a server, use a [`FaultProxy`]
//! instead of the [`Switch`].
//!
//! ```
//! use simba_core::{MemoryBackend, SystemClock};
//! use simba_tck::{Connection, FaultyBackend, Fixture, Profile, Switch, async_trait};
//!
//! struct Memory(MemoryBackend);
//!
//! #[async_trait]
//! impl Fixture for Memory {
//!     async fn connect(&self) -> Connection {
//!         let network = Switch::new();
//!         let backend = FaultyBackend::new(self.0.clone(), SystemClock, network.clone());
//!         Connection::new(backend, network)
//!     }
//!
//!     // What the store cannot do, if anything.
//!     fn profile(&self) -> Profile {
//!         Profile::default().with_survives_restart(false)
//!     }
//! }
//!
//! simba_tck::suite!(Memory(MemoryBackend::new()));
//! # fn main() {}
//! ```
//!
//! `cargo test` runs everything, `cargo test renewal` one group. A broken guarantee fails its test with a
//! message that starts with `broken:` and names the guarantee. A case about something that the [`Profile`] excludes
//! prints `skipped: <reason>`; a missing server is a failure, never a skip. `cargo test` counts a skipped
//! case as passed and hides its output: if the variable `SIMBA_TCK_SKIPS` names a file, every skipped case appends
//! the line `<package>/<program> <group>::<case>: <reason>` to it. For a program other than tests, [`cases()`] lists
//! the same cases, and [`Case::run`] returns the [`Outcome`].
//!
//! # What is checked
//!
//! | group | guarantee |
//! |---|---|
//! | [`jvm_simba`](cases::jvm_simba) | the five cases of the suite of JVM Simba |
//! | [`exclusion`](cases::exclusion) | at most one contender holds, and a refusal names the holder |
//! | [`renewal`](cases::renewal) | a holder keeps the mutex until it releases it |
//! | [`loss`](cases::loss) | a holder is notified of a loss and its reason before another holds |
//! | [`tokens`](cases::tokens) | tokens grow with every acquisition, and with nothing else |
//! | [`handover`](cases::handover) | the next waiter is notified, in order, and no call passes a waiter |
//! | [`observer`](cases::observer) | observers see every owner, report an unknown state, never contend |
//! | [`names`](cases::names) | one name means one mutex |
//! | [`lifecycle`](cases::lifecycle) | a contender that stops leaves nothing behind |
//! | [`cancellation`](cases::cancellation) | a future may be dropped at any await point |
//! | [`session`](cases::session) | the contract of [`Session`](simba_core::spi::Session), by direct calls |
//! | [`faults`](cases::faults) | network faults and store restarts cause no unnecessary loss |
//! | [`load`](cases::load) | many contenders and many mutexes, checked by their history |
//! | [`operate`](cases::operate) | the operations for operators, if the backend has them |
//!
//! The cases run in real time with the [lease](Fixture::lease) of the fixture. A case that checks a notification does
//! not measure time: its poll and its lease are so long that only the notification explains the hand-over.
//!
//! # Faults
//!
//! [`rows!`] repeats the faults of a network, [`processes!`] those of a process: killed, stopped, terminated.
//! Each test has the number of its row in the fault matrix in its name; `SIMBA_FAULT_ROUNDS` sets the number of
//! rounds.
//!
//! # Tools
//!
//! These tools are also useful for a backend's own tests:
//!
//! - [`FaultProxy`] is a TCP proxy in front of a real server that stalls, cuts, delays, and loses replies.
//! - [`FaultyBackend`] does the same to any backend without a network, controlled by a [`Weather`] or manually by a
//!   [`Switch`].
//! - [`SkewedClock`] runs at another rate, jumps and pauses.
//! - [`explain_failures`] makes a failing test print the engine's log and the load of the machine.
//! - [`History`] records events, checks them against every [`Rule`], and shows them as a timeline.

pub mod cases;
pub mod clock;
mod diagnosis;
pub mod faulty;
mod fixture;
mod held;
pub mod history;
mod list;
mod network;
pub mod processes;
mod profile;
pub mod proxy;
pub mod rows;
mod skips;
mod suite;
mod world;

pub use clock::SkewedClock;
pub use diagnosis::explain_failures;
pub use faulty::{Call, FaultyBackend, Leg, Passage, Switch, Weather};
pub use fixture::{Connection, Fixture};
pub use held::{Held, Trap};
pub use history::{Event, History, Rule, Violation, What};
pub use network::Network;
pub use processes::Shared;
pub use profile::Profile;
pub use proxy::{FaultProxy, Proxies};
pub use rows::rounds;
pub use simba_core::spi::async_trait;
pub use suite::{CASE_LIMIT, Case, CaseFuture, Outcome, cases, run_sample};
#[doc(hidden)]
pub use suite::{run, run_within};
