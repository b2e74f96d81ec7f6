//! The compatibility kit for Simba backends: what every store has to promise, as tests against the real
//! thing.
//!
//! A backend author implements one trait, [`Fixture`], and writes one line, [`suite!`]. The line becomes one
//! plain `#[test]` per promise, each with a tokio runtime of its own; the author needs neither.
//!
//! # Example
//!
//! A fixture hands out connections, as many processes would have, each with a network that can be broken.
//! This is the whole of `tests/tck.rs` for a store within the process; in front of a server, a [`FaultProxy`]
//! takes the place of the [`Switch`].
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
//! `cargo test` runs everything, `cargo test renewal` one group. A broken promise fails its test with a
//! message that begins with `broken:` and says which. A case about something that the [`Profile`] rules out
//! prints `skipped: <reason>`; a server that is not there is a failure, never a skip. `cargo test` counts a skipped
//! case as passed and hides what it prints: if the variable `SIMBA_TCK_SKIPS` names a file, every skipped case adds
//! the line `<package>/<program> <group>::<case>: <reason>` to it. For a program in place of tests, [`cases()`] lists
//! the same cases, and [`Case::run`] returns the [`Outcome`].
//!
//! # What is checked
//!
//! | group | promise |
//! |---|---|
//! | [`seeds`](cases::seeds) | the five cases of the JVM kit |
//! | [`exclusion`](cases::exclusion) | at most one holds, and a refusal names the holder |
//! | [`renewal`](cases::renewal) | a holder keeps the mutex for as long as it wants |
//! | [`loss`](cases::loss) | a holder learns that it has lost, and why, before another holds |
//! | [`tokens`](cases::tokens) | tokens grow with every acquisition, and with nothing else |
//! | [`handover`](cases::handover) | the next one is woken, in order, and nobody passes a waiter |
//! | [`observer`](cases::observer) | observers see every owner, know when they do not know, never contend |
//! | [`names`](cases::names) | one name means one mutex |
//! | [`lifecycle`](cases::lifecycle) | whoever leaves, leaves nothing behind |
//! | [`cancellation`](cases::cancellation) | a future may be dropped anywhere |
//! | [`session`](cases::session) | the contract of [`Session`](simba_core::Session), by direct calls |
//! | [`faults`](cases::faults) | a bad network and a store that restarts cost no more than they must |
//! | [`load`](cases::load) | many contenders and many mutexes, judged by their history |
//! | [`operate`](cases::operate) | what operators see and do, where the backend offers it |
//!
//! The cases run in real time on the [lease](Fixture::lease) of the fixture. None of them proves a hand-over
//! by its speed: where a wake-up counts, the poll and the lease are so long that nothing else explains it.
//!
//! # Faults
//!
//! [`rows!`] repeats the faults of a bad network round after round, [`processes!`] those of a process: killed,
//! stopped, told to end. Each test has the number of its row in the fault matrix in its name;
//! `SIMBA_FAULT_ROUNDS` sets the number of rounds.
//!
//! # Tools
//!
//! The tools behind the cases serve a backend's own tests as well:
//!
//! - [`FaultProxy`] is a TCP proxy in front of a real server that stalls, cuts, delays, and loses replies.
//! - [`FaultyBackend`] does the same to any backend without a network, by a [`Weather`] or by hand with a
//!   [`Switch`].
//! - [`SkewedClock`] runs too fast or too slow, jumps and stands still.
//! - [`explain_failures`] makes a failing test print the engine's log and the load of the machine.
//! - [`History`] writes down what happened, checks it against every [`Rule`], and shows it as a timeline.

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
pub use simba_core::async_trait;
pub use suite::{CASE_LIMIT, Case, CaseFuture, Outcome, cases, run_sample};
#[doc(hidden)]
pub use suite::{run, run_within};
