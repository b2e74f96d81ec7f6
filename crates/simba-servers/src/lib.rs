//! Starts and stops the servers that the tests run against: real ones, each on a loopback port and in its own
//! temporary directory.
//!
//! The test command starts one server of each kind and passes their URLs to the tests: [`shared`]. A test that
//! restarts a server, kills it or changes its clock starts [its own](Setup).
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use simba_servers::Setup;
//!
//! let mut server = Setup::mariadb().with_arg("--read-only").start()?;
//! println!("{}", server.url());
//! server.restart()?;
//! # Ok(())
//! # }
//! ```

mod cache;
mod certificates;
mod curator;
mod data_dir;
mod debian;
mod disk;
mod ensemble;
mod faketime;
mod kinds;
mod logins;
mod record;
mod server;
mod setup;
mod shared;

pub use certificates::Certificates;
pub use curator::curator_classpath;
pub use data_dir::keep_data_on_disk;
pub use debian::install_tools;
pub use disk::SmallDisk;
pub use ensemble::{Ensemble, EnsemblePlan};
pub use faketime::faketime_library;
pub use record::Record;
pub use server::Server;
pub use setup::{Setup, free_address};
pub use shared::shared;
