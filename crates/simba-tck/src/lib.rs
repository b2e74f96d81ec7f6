//! The compatibility kit for Simba backends.

pub mod clock;
pub mod faulty;
pub mod history;
pub mod proxy;

pub use clock::SkewedClock;
pub use faulty::{Call, FaultyBackend, Leg, Passage, Switch, Weather};
pub use history::{Event, History, Rule, Violation, What};
pub use proxy::{FaultProxy, Held};
