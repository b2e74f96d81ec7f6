//! TLS settings of the backends: three levels of server verification, custom authorities, a client certificate.

mod pem;
mod verifier;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use simba_core::spi::ConnectUrl;
use simba_core::{Error, ErrorKind, Result};

use verifier::{AnyCertificate, AnyName};

/// How the server's certificate is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verify {
    /// A trusted authority signed it, for the host of the connection.
    Full,
    /// A trusted authority signed it, for any host. Each customer of that authority can impersonate the server.
    Ca,
    /// Not at all. The traffic is encrypted, but an attacker on the network can impersonate the server.
    Nothing,
}

/// The settings of an encrypted connection.
///
/// # Examples
///
/// ```
/// use simba_net::{Tls, Verify};
///
/// let tls = Tls::new(Verify::Full).with_server_name("db.internal");
/// assert_eq!(tls.verify(), Verify::Full);
/// tls.client_config()?;
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Tls {
    verify: Verify,
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
    server_name: Option<String>,
}

impl Tls {
    /// Creates settings with this verification, against the well-known public authorities.
    pub const fn new(verify: Verify) -> Self {
        Self { verify, ca: None, identity: None, server_name: None }
    }

    /// Reads the keys `tls`, `tls-ca`, `tls-cert`, `tls-key` and `tls-name` of a URL. Returns `None` without `tls`,
    /// unless the URL's scheme `always` means TLS.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an invalid value, or a key whose counterpart is missing.
    pub fn from_url(url: &ConnectUrl, always: bool) -> Result<Option<Self>> {
        let verify = match url.query("tls") {
            None if !always => {
                let scheme = url.scheme();
                return match url.queries().find(|(key, _)| key.starts_with("tls-")) {
                    None => Ok(None),
                    Some((key, _)) => Err(invalid(format!("`{key}` is for TLS: write {scheme}s://"))),
                };
            }
            None | Some("full") => Verify::Full,
            Some("ca") => Verify::Ca,
            Some("nothing") => Verify::Nothing,
            Some(_) => return Err(invalid("`tls` in the URL is not `full`, `ca` or `nothing`")),
        };
        let mut tls = Self::new(verify);
        if let Some(ca) = url.query("tls-ca") {
            tls = tls.with_ca(ca);
        }
        if let Some(name) = url.query("tls-name") {
            tls = tls.with_server_name(name);
        }
        match (url.query("tls-cert"), url.query("tls-key")) {
            (Some(certificate), Some(key)) => Ok(Some(tls.with_identity(certificate, key))),
            (None, None) => Ok(Some(tls)),
            _ => Err(invalid("`tls-cert` and `tls-key` go together")),
        }
    }

    /// Trusts only the authorities in this PEM file.
    pub fn with_ca(self, path: impl Into<PathBuf>) -> Self {
        Self { ca: Some(path.into()), ..self }
    }

    /// Authenticates to the server with a certificate and its key, both from PEM files.
    pub fn with_identity(self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self { identity: Some((certificate.into(), key.into())), ..self }
    }

    /// Expects a certificate for this name instead of the host of the connection.
    pub fn with_server_name(self, name: impl Into<String>) -> Self {
        Self { server_name: Some(name.into()), ..self }
    }

    /// Returns how the server's certificate is verified.
    #[must_use]
    pub const fn verify(&self) -> Verify {
        self.verify
    }

    /// Returns the file with the authorities to trust, or `None` for the public ones.
    #[must_use]
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    /// Returns the files with the client's certificate and key.
    #[must_use]
    pub fn identity(&self) -> Option<(&Path, &Path)> {
        self.identity.as_ref().map(|(certificate, key)| (certificate.as_path(), key.as_path()))
    }

    /// Returns the name that the certificate of `host` must contain.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is not a valid host name.
    pub fn server_name(&self, host: &str) -> Result<ServerName<'static>> {
        let name = self.server_name.as_deref().unwrap_or(host);
        ServerName::try_from(name.to_owned()).map_err(|error| {
            Error::new(ErrorKind::Invalid, format!("`{name}` is not a valid server name for a certificate"))
                .with_source(error)
        })
    }

    /// Returns these settings as a configuration for rustls.
    ///
    /// Reads the files in every call. A backend that calls this for every connection uses certificates and keys that were
    /// replaced from its next connection on, without a restart.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if a file cannot be read or has the wrong content. The message names the file.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| config("this build of rustls supports no TLS version", error))?;
        let builder = match self.verify {
            Verify::Full => builder.with_root_certificates(self.roots()?),
            Verify::Ca => {
                let verifier = AnyName::new(self.roots()?, provider)
                    .map_err(|error| config("the authorities to trust cannot be used", error))?;
                builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier))
            }
            Verify::Nothing => {
                let verifier = Arc::new(AnyCertificate::new(provider));
                builder.dangerous().with_custom_certificate_verifier(verifier)
            }
        };
        let config = match &self.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(pem::certificates(certificate)?, pem::key(key)?)
                .map_err(|error| {
                    config(
                        &format!("`{}` and `{}` do not match", certificate.display(), key.display()),
                        error,
                    )
                })?,
        };
        Ok(Arc::new(config))
    }

    fn roots(&self) -> Result<Arc<RootCertStore>> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(path) => {
                for certificate in pem::certificates(path)? {
                    roots.add(certificate).map_err(|error| {
                        config(&format!("`{}` contains no CA certificate", path.display()), error)
                    })?;
                }
            }
        }
        Ok(Arc::new(roots))
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn config(message: &str, source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Config, message.to_owned()).with_source(source)
}

#[cfg(test)]
mod tests;
