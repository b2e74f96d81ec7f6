//! Reads certificates and keys from files, with errors that name the file.

use std::path::Path;

use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use simba_core::{Error, ErrorKind, Result};

/// Returns all certificates of a file, at least one.
pub(super) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match found {
        Ok(found) if found.is_empty() => Err(invalid_file(path, "certificate", pem::Error::NoItemsFound)),
        Ok(found) => Ok(found),
        Err(error) => Err(invalid_file(path, "certificate", error)),
    }
}

/// Returns the first private key of a file.
pub(super) fn key(path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| invalid_file(path, "private key", error))
}

/// Returns the error for a file. The message does not quote the content, which may be a key.
fn invalid_file(path: &Path, what: &str, error: pem::Error) -> Error {
    let path = path.display();
    match error {
        pem::Error::Io(error) => {
            Error::new(ErrorKind::Config, format!("cannot read `{path}`: {error}")).with_source(error)
        }
        pem::Error::NoItemsFound => {
            Error::new(ErrorKind::Config, format!("`{path}` contains no {what} in PEM format"))
        }
        _ => Error::new(ErrorKind::Config, format!("`{path}` is not a valid PEM file")),
    }
}
