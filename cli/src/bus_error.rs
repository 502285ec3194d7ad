//! What is said when a mapped weight file cannot be read any more.
//!
//! Weights are used where they lie, in mapped files. When such a file is cut short, or its disk
//! fails, the system sends SIGBUS to whoever reads the lost part. Invariant: the program then ends
//! with an exit code and a message that names the file; the handler allocates nothing and takes no
//! lock.

use std::fs::File;
use std::io::Read;

use libc::{c_int, c_void, siginfo_t};

/// Explains SIGBUS from now on.
pub(crate) fn explain() {
    // SAFETY: all fields are integers, pointers or sets of signals, for which zero is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = handle;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESETHAND;
    // SAFETY: the action is complete, and its handler is a function of the right type that only
    // does what is allowed in one. Without the handler, the system's own message has to do.
    unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
}

/// Writes to standard error and ends the process at once.
pub(crate) fn end(message: &[u8]) -> ! {
    // SAFETY: the pointer and the length are those of a slice; `_exit` has no conditions.
    unsafe {
        libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
        libc::_exit(1)
    }
}

extern "C" fn handle(_signal: c_int, info: *mut siginfo_t, _context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the system gives valid information, which has an address for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut line = [0; LINE_BYTES];
    let file = mapped_file(address, &mut line).unwrap_or(b"a mapped file");
    let parts: [&[u8]; 3] = [
        b"error: cannot read ",
        file,
        b": it was cut short while it was in use, or its disk failed; restore the file and start \
          again\n",
    ];
    let mut message = [0; LINE_BYTES + 256];
    let mut length = 0;
    for part in parts {
        message[length..length + part.len()].copy_from_slice(part);
        length += part.len();
    }
    end(&message[..length]);
}

/// Longest line of the list of mappings that is read whole: a path and some numbers.
const LINE_BYTES: usize = 4096 + 128;

/// The file that is mapped at an address, by the system's list. `line` is memory to work in.
fn mapped_file(address: usize, line: &mut [u8; LINE_BYTES]) -> Option<&[u8]> {
    let mut maps = File::open("/proc/self/maps").ok()?;
    let mut chunk = [0; 1024];
    let mut length = 0;
    loop {
        let count = maps.read(&mut chunk).ok().filter(|&count| count > 0)?;
        for &byte in &chunk[..count] {
            if byte != b'\n' {
                // What is too long for a line loses its end.
                line[length] = byte;
                length = (length + 1).min(LINE_BYTES - 1);
                continue;
            }
            if covers(&line[..length], address) {
                let path = line[..length].iter().position(|&byte| byte == b'/')?;
                return Some(&line[path..length]);
            }
            length = 0;
        }
    }
}

/// Whether a line `begin-end …`, in hexadecimal digits, is about an address.
fn covers(line: &[u8], address: usize) -> bool {
    let number = |digits: &[u8]| {
        std::str::from_utf8(digits).ok().and_then(|digits| usize::from_str_radix(digits, 16).ok())
    };
    let mut bounds = line.split(|byte| matches!(byte, b'-' | b' ')).map(number);
    match (bounds.next().flatten(), bounds.next().flatten()) {
        (Some(begin), Some(end)) => (begin..end).contains(&address),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_at_an_address_is_found() {
        let mut line = [0; LINE_BYTES];
        let path = mapped_file(covers as *const () as usize, &mut line).unwrap();
        let own = std::env::current_exe().unwrap();
        assert_eq!(path, own.as_os_str().as_encoded_bytes());
        assert_eq!(mapped_file(1, &mut line), None);
    }

    #[test]
    fn lines_are_read() {
        let line = b"7f0a-7f10 r--p 00000000 08:01 42   /models/model.safetensors";
        assert!(covers(line, 0x7f0a) && covers(line, 0x7f0f));
        assert!(!covers(line, 0x7f10) && !covers(line, 0) && !covers(b"nonsense", 0));
    }
}
